package fsm

import (
	"bytes"
	"math"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// rotate replaces the key by one of so many times letter.
func rotate(generation uint32, letter byte) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_RotateKey{RotateKey: &fsmpb.RotateKey{
		Generation: generation, Key: bytes.Repeat([]byte{letter}, KeyBytes), UnixMillis: int64(generation) * 1000,
	}}}
}

// Every key follows the one before, which is kept until the next.
func TestRotateKey(t *testing.T) {
	h := newHarness(t)
	h.refuse(rotate(2, 'b'), ErrRefused, "no cluster")
	h.do(&fsmpb.Command{
		Op: &fsmpb.Command_Init{Init: &fsmpb.Init{ClusterId: "c1", ClusterKey: bytes.Repeat([]byte{'a'}, KeyBytes),
			Level: &fsmpb.Level{Level: Level}}}})
	keys := func(want string) {
		t.Helper()
		var got []string
		for i, k := range h.s.Keys() {
			if k.Generation != h.s.KeyGeneration()-uint32(i) {
				t.Fatalf("key %d has generation %d, and %d is the present one", i, k.Generation, h.s.KeyGeneration())
			}
			got = append(got, strings.TrimRight(string(k.Key), string(k.Key[:1]))+string(k.Key[:1]))
		}
		if strings.Join(got, " ") != want {
			t.Fatalf("keys are %q, want %s", got, want)
		}
	}
	keys("a")
	version := h.s.MapVersion()
	for _, g := range []uint32{0, 1, 3} {
		h.refuse(rotate(g, 'b'), ErrRefused, "does not follow 1")
	}
	short := rotate(2, 'b')
	short.GetRotateKey().Key = short.GetRotateKey().Key[1:]
	h.refuse(short, ErrInvalid, "31 bytes, want 32")
	h.refuse(rotate(2, 'a'), ErrInvalid, "was there")
	h.do(rotate(2, 'b'))
	keys("b a")
	h.refuse(rotate(3, 'a'), ErrInvalid, "was there")
	h.refuse(rotate(2, 'c'), ErrRefused, "does not follow 2")
	h.do(rotate(3, 'c'))
	keys("c b")
	if m := h.s.Meta(); m.KeyUnixMillis != 3000 || h.s.MapVersion() != version {
		t.Fatalf("meta %v, map version %d, want 3000 and %d: sessions need not hear of it", m.KeyUnixMillis,
			h.s.MapVersion(), version)
	}
	h.s.editMeta().KeyGeneration = math.MaxUint32
	h.s.takeChanges()
	if r := Apply(h.s, rotate(0, 'd')); r.Err == nil || !strings.Contains(r.Err.Error(), "every generation") {
		t.Fatalf("after the last generation: %v", r.Err)
	}
}

// Rows whose keys cannot be are refused.
func TestLoadKeys(t *testing.T) {
	for want, change := range map[string]func(*fsmpb.Meta){
		"has a key of 0 bytes":           func(m *fsmpb.Meta) { m.ClusterKey = nil },
		`cluster "" has a key of 32`:     func(m *fsmpb.Meta) { m.ClusterId = "" },
		"generation 2 follows one of 0":  func(m *fsmpb.Meta) { m.PreviousKey = nil },
		"generation 1 follows one of 32": func(m *fsmpb.Meta) { m.KeyGeneration = 0 },
		"same as the one before":         func(m *fsmpb.Meta) { m.PreviousKey = m.ClusterKey },
	} {
		h := newHarness(t)
		h.do(&fsmpb.Command{
			Op: &fsmpb.Command_Init{Init: &fsmpb.Init{ClusterId: "c1", ClusterKey: bytes.Repeat([]byte{'a'}, KeyBytes),
				Level: &fsmpb.Level{Level: Level}}}})
		h.do(rotate(2, 'b'))
		change(h.s.editMeta())
		if _, err := Load(h.s.Rows()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("loaded: %v, want %q", err, want)
		}
	}
}
