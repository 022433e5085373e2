// Package poll tells which file descriptors can be read, for event loops: a
// goroutine that serves many quiet connections without one goroutine for each.
//
// It leaves reading, writing and deciding who is quiet to its user. Read [Poller] first. A single goroutine
// calls Wait; the other methods may be called
// concurrently with it. A Poller never closes a descriptor that it is told to
// watch; its user removes each before closing it.
//
// A goroutine in Wait holds a thread, which the kernel wakes directly; the
// runtime's poller has to find a thread for the goroutine first. Redis's event
// loop (ae.c) is the model.
package poll

import "runtime"

// Yield lets the goroutines and the threads that wait for a processor run first. It is for whoever moves megabytes
// beside requests that need microseconds. They have to wait otherwise where the kernel does not preempt system calls.
func Yield() {
	runtime.Gosched()
	yieldThread()
}
