package gateway

import (
	"testing"

	"github.com/kvd-project/kvd/internal/redis/values"
)

// Each function that performs a command has a row.
func TestPerformersHaveRows(t *testing.T) {
	rows := make(map[string]*command)
	for _, c := range commandsByID {
		rows[c.name] = c
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
