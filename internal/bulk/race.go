//go:build race

package bulk

const raced = true
