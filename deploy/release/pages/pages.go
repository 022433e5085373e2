//go:build pages

package main

import (
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// write leaves the man pages of root and all below it, dated when, and what completes it in bash, zsh
// and fish in the folder dir.
func write(root *cobra.Command, dir string, when time.Time) error {
	root.DisableAutoGenTag = true
	name := root.Name()
	for _, w := range []struct {
		file string
		gen  func(string) error
	}{
		{"bash/" + name, func(file string) error { return root.GenBashCompletionFileV2(file, true) }},
		{"zsh/_" + name, root.GenZshCompletionFile},
		{"fish/" + name + ".fish", func(file string) error { return root.GenFishCompletionFile(file, true) }},
	} {
		file := filepath.Join(dir, w.file)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := w.gen(file); err != nil {
			return err
		}
	}
	man := filepath.Join(dir, "man1")
	if err := os.MkdirAll(man, 0o755); err != nil {
		return err
	}
	return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Date: &when, Source: "kvd", Manual: "kvd"}, man)
}
