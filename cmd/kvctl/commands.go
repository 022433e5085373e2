package main

import "github.com/kvd-project/kvd/internal/ctl"

// commands are those of one invocation.
type commands struct{ *ctl.App }
