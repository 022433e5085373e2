// Package hostid names the machine a process runs on. So a client can tell
// whether a memory node is close enough to share memory with.
//
// It leaves proving it to the shm provider: equal names say that trying is
// worthwhile. [ID] is its one function and may be called concurrently.
package hostid

import (
	"os"
	"strings"
	"sync"
)

// ID is equal for two processes under one running kernel and differs between
// machines and between boots. Containers of one machine share it. It is empty,
// and then equal to nobody's, when the kernel does not tell.
//
// It is the kernel's boot id (random(4)), which unlike /etc/machine-id is not
// copied with a disk image and cannot outlive the memory it stands for.
func ID() string { return id() }

var id = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
})

// Same tells whether a and b name one machine.
func Same(a, b string) bool { return a != "" && a == b }
