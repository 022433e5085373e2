//go:build pages

package main

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

func init() {
	seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err == nil {
		err = write(newProgram(os.Stdin, os.Stdout, os.Stderr).root(), os.Args[1], time.Unix(seconds, 0).UTC())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pages of kvctl:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
