// Package keepertest gives tests the folders that memory-path wants.
package keepertest

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Folder is a folder of a tmpfs, of mode 0700, which goes with the test. Without a tmpfs the test is skipped, or fails
// in CI.
func Folder(t testing.TB) string {
	t.Helper()
	const tmpfs = "/dev/shm"
	var on unix.Statfs_t
	if err := unix.Statfs(tmpfs, &on); err != nil || on.Type != unix.TMPFS_MAGIC {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s is no tmpfs: %v", tmpfs, err)
		}
		t.Skipf("%s is no tmpfs: %v", tmpfs, err)
	}
	dir, err := os.MkdirTemp(tmpfs, "kvd-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
