//go:build !linux

package alarm

var newWaker = newGoTimer
