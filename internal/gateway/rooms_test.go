package gateway

import (
	"bytes"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Each function that performs a command has a description, and each description of a command that is served a function,
// but for containers.
func TestPerformersHaveRows(t *testing.T) {
	rows := make(map[string]*command)
	for _, c := range commandsByID {
		rows[c.Name] = c
	}
	for _, d := range spec.Table {
		c := rows[d.Name]
		if kinds := values.Bit(c.key != nil) + values.Bit(c.keys != nil) + values.Bit(c.conn != nil) +
			values.Bit(c.batch != nil) + values.Bit(d.Instead != ""); kinds != 1 && (kinds != 0 || c.sub == nil) {
			t.Errorf("%s is performed in %d ways", d.Name, kinds)
		}
		if (c.key != nil) != (d.Kind != 0) {
			t.Errorf("%s is of kind %d", d.Name, d.Kind)
		}
	}
	for name := range values.OneKey {
		if c := rows[name]; c == nil || c.key == nil {
			t.Errorf("%s, on one key, has no row", name)
		}
	}
	for name := range values.SeveralKeys {
		if c := rows[name]; c == nil || c.keys == nil {
			t.Errorf("%s, on several keys, has no row", name)
		}
	}
	for name := range values.WaitingFor {
		if c := rows[name]; c == nil || c.block == nil {
			t.Errorf("%s, which waits, has no row", name)
		}
	}
}

// A group may have the name of the word before the keys: a user needs the rights to the keys behind the right one.
func TestKeysOfGroupNamedStreams(t *testing.T) {
	args := bytes.Fields([]byte("xreadgroup GROUP streams b COUNT 1 NOACK STREAMS c d > >"))
	want := acl.Span{First: 8, Last: 9, Step: 1}
	if keys, also := commandsByID[spec.CmdXreadgroup].keySpans(args); keys != want || also != (acl.Span{}) {
		t.Errorf("keys are %+v and %+v", keys, also)
	}
}
