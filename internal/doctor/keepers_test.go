package doctor

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/verbs"
)

// TestKeepers: this process says as keepers do why no worker comes up, and is found for as long as it does.
func TestKeepers(t *testing.T) {
	found := func() (all []Finding) {
		for _, f := range Examine(Local(verbs.Options{}), "") {
			if f.Check == fmt.Sprintf("keeper %d", os.Getpid()) {
				all = append(all, f)
			}
		}
		return all
	}
	if got := found(); len(got) != 0 {
		t.Errorf("found %v", got)
	}
	fd, err := unix.MemfdCreate("kvd-trouble", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte("its workers die\x1b")); err != nil {
		t.Fatal(err)
	}
	if got := found(); len(got) != 1 || got[0].Group != "memory nodes" || got[0].Level != Warn ||
		got[0].Found != "its workers die?" {
		t.Errorf("found %v", got)
	}
}
