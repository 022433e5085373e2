package server

import (
	"errors"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A directory node that finds a command of a later version in the log stops and says so. It applies nothing that comes
// after it, now or when it is started again, and takes no snapshot in which the command would be missing.
func TestLaterCommandStops(t *testing.T) {
	fs := vfs.NewMem()
	n := single(t, fs, forever)
	encode := func(c *fsmpb.Command) []byte {
		c.Term = n.raft.CurrentTerm()
		b, err := proto.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	put := func(id string) []byte {
		return encode(&fsmpb.Command{Op: &fsmpb.Command_PutDirectory{PutDirectory: &fsmpb.PutDirectory{
			Directory: &fsmpb.Directory{Id: id, RaftAddr: "h:1", GrpcAddr: "h:2"},
		}}})
	}
	before := n.raft.Apply(put("d8"), 0)
	if err := before.Error(); err != nil {
		t.Fatal(err)
	}
	applied := n.machine.appliedIndex()
	later := n.raft.Apply(
		protowire.AppendVarint(protowire.AppendTag(encode(&fsmpb.Command{}), 9999, protowire.VarintType), 1), 0)
	after := n.raft.Apply(put("d9"), 0)
	if err := later.Error(); err == nil {
		if r := later.Response().(fsm.Result); !errors.Is(r.Err, fsm.ErrLevel) {
			t.Errorf("the later command: %+v", r)
		}
	}
	_ = after.Error() // answered or not, it has no effect
	if _, err := n.machine.Snapshot(); !errors.Is(err, fsm.ErrLevel) {
		t.Errorf("a snapshot: %v", err)
	}
	for i := range 2 {
		x := n
		if <-n.Done(); i > 0 {
			x = start(t, Options{ID: "d1", DataDir: "d1", fs: fs, Lease: forever, Version: "this"})
		}
		<-x.Done()
		if err := x.Err(); !errors.Is(err, fsm.ErrLevel) || !strings.Contains(err.Error(), "of the log") ||
			!strings.Contains(err.Error(), "knows levels up to 4") {
			t.Errorf("start %d: it stopped because of %v", i, err)
		}
		x.machine.view(func(s *fsm.State) {
			if s.DirectoryNode("d8") == nil || s.DirectoryNode("d9") != nil {
				t.Errorf("start %d: members %v, want those before the command of a later version", i, s.Directory())
			}
		})
		if got := x.machine.appliedIndex(); got != applied {
			t.Errorf("start %d: applied up to %d, want %d", i, got, applied)
		}
	}
}

// A caller of a later version, whose RPC this one does not have, is told so, and by whom.
func TestUnknownRPC(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	conn, err := grpc.NewClient("passthrough:///"+n.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	err = conn.Invoke(testCtx(t), "/kvd.directory.v1.Directory/Later", &dirpb.StatusRequest{}, &dirpb.StatusReply{})
	want := `directory node "d1" runs kvd devel, which does not know "/kvd.directory.v1.Directory/Later"; nothing was done`
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), want) {
		t.Fatalf("error %v, want %q", err, want)
	}
}

// A directory that runs this version alone is at its level from the first command on. A directory node of a version
// before levels cannot join it, and is told why.
func TestLevelOfNew(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	if n.level() != fsm.Level {
		t.Fatalf("level %d, want %d", n.level(), fsm.Level)
	}
	_, err := dial(t, n).JoinDirectory(testCtx(t), &dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: "127.0.0.1:1",
		GrpcAddr: "127.0.0.1:2", Level: fsm.Level - 1, Version: "0.9"})
	if want := `directory node "d2" runs kvd "0.9", which knows levels up to 3, and the directory is at level 4: start kvd devel there, or later`; err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("error %v, want %q", err, want)
	}
}
