package admit

import (
	"bytes"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/token"
)

// tokenKeys are those of a directory whose present key has this generation.
func tokenKeys(generation uint32) (list []*dirpb.TokenKey) {
	for g := generation; g > 0 && g+maxKeys > generation; g-- {
		list = append(list, &dirpb.TokenKey{Generation: g, Key: bytes.Repeat([]byte{byte(g)}, token.KeySize)})
	}
	return list
}

// Keys are checked before they are taken from a directory.
func TestKeys(t *testing.T) {
	good := tokenKeys(3)
	if keys, err := Keys(good); err != nil || len(keys) != 2 || keys[0].Generation != 3 || keys[1].Generation != 2 {
		t.Fatalf("%v, %v", keys, err)
	}
	for name, list := range map[string][]*dirpb.TokenKey{
		"none": nil, "three": append(tokenKeys(4), tokenKeys(2)[1]), "the wrong order": {good[1], good[0]},
		"twice": {good[0], good[0]},
		"short": {{Generation: 3, Key: good[0].Key[1:]}}, "generation 0": {{Key: good[0].Key}}, "before the first": {
			tokenKeys(1)[0], {Key: good[0].Key}},
	} {
		if keys, err := Keys(list); err == nil {
			t.Errorf("%s: taken as %v", name, keys)
		}
	}
}

// A directory that gives ids out again, since it lost what it knew, does not make old
// tokens good by that.
func TestSessionsForgotten(t *testing.T) {
	var s Sessions
	s.Learn(&dirpb.Sessions{Last: 9, Live: []uint32{4, 9}})
	s.Learn(&dirpb.Sessions{Last: 5, Live: []uint32{4, 5}})
	for id, ended := range map[uint32]bool{3: true, 4: false, 5: false, 6: true, 9: true, 10: false} {
		if s.Ended(id) != ended {
			t.Errorf("session %d: ended %v, want %v", id, !ended, ended)
		}
	}
}
