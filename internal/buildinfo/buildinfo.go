// Package buildinfo says which version of the store a command is. It leaves what a
// release is called to the linker; the idea is that of `go version -m`.
//
// Start with [Version]. Its functions may be called concurrently.
package buildinfo

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Version is the release that was linked, or the commit that was built if that is "".
// "+changes" behind a commit says that the sources differed from it.
func Version(release string) string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	v, dirty := info.Main.Version, ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && (v == "" || v == "(devel)"):
			v = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "+changes"
		}
	}
	if v == "" || v == "(devel)" {
		v = "devel"
	}
	return v + dirty
}

// Line is what `COMMAND version` prints: the command, its version, Go's, the platform.
func Line(command, release string) string {
	return fmt.Sprintf("%s %s %s %s/%s", command, Version(release), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
