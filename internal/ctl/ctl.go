// Package ctl is what kvctl's groups of commands share. It has the way to a store and its directory, and keys and
// amounts as people and scripts write them. It prints tables and JSON, and has the exit status, progress bars and
// waits.
//
// It leaves the commands to the packages below it, a group each, and the tree of commands, flags and contexts to
// cmd/kvctl. Read [App] first, then [Backend] and [Store] for how a command reaches the store, and [ExitWith] for how
// it ends.
//
// A process runs a single command, or, as a shell, one after the other, and each has an App of its own. An App is not
// used concurrently. Workers of a command may step its [Bar] together. A Backend or a session is closed by the command
// that opens it; [App.With] and [App.WithBackend] do both. Data goes to Stdout and nothing else does; progress and
// errors go to Stderr. The shape is that of etcdctl: a folder for each group, and printers beside.
package ctl

import (
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/identity"
)

// App is one invocation. Its fields are set before a command runs; only that command uses it.
type App struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer

	// Global flags.
	Context   string
	Directory []string
	Namespace string
	Provider  string
	Require   string
	// RDMADevice is verbs.Options.Device.
	RDMADevice string
	Timeout    time.Duration
	Output     string
	Hex        bool
	TLSCA      string
	TLSCert    string
	TLSKey     string
	TLSCRL     string
	TLSName    string
	Identities client.Identities
	Mapping    identity.Mapping // of identities
	Insecure   bool

	// Backend reaches the store; tests put another in its place.
	Backend func(*App) (Backend, error)
	// Self is the command line that starts this program again.
	Self func() ([]string, error)
	// Clusters has the names that contexts give to clusters, and Cluster is a with the flags of the one called name.
	Clusters func() ([]string, error)
	Cluster  func(a *App, name string) (*App, error)
	// Ready completes the global flags of a command that only suggests words, and checks them.
	Ready func(*cobra.Command) error
	// Version is that of the release, or empty.
	Version string
	// Verb is the command that runs, without kvctl.
	Verb string
	Now  func() time.Time
	// Parent is the shell that this command was typed into, if any.
	Parent *App
}

// New has the flags as they are without a word from the user. The fields that need the whole program are nil.
func New(stdin io.Reader, stdout, stderr io.Writer) *App {
	return &App{Stdin: stdin, Stdout: stdout, Stderr: stderr, Backend: OpenStore, Now: time.Now,
		Directory: []string{"127.0.0.1:7400"}, Namespace: "default", Timeout: 5 * time.Second, Output: "table",
		Self: func() ([]string, error) {
			p, err := os.Executable()
			return []string{p}, err
		}}
}
