package client_test

import (
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
)

// A record that one client wrote and another deletes goes home, and both count it the same; the counters do
// not fall when their sessions end.
func TestStatsOfMemoryThatGoesHome(t *testing.T) {
	st, a := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20}, client.Options{})
	b, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices(),
		Provider: "shm"})
	if err != nil {
		t.Fatal(err)
	}
	var keys [][]byte
	for i := range 500 {
		keys = append(keys, fmt.Appendf(nil, "k%d", i))
		if _, err := a.Put(t.Context(), keys[i], make([]byte, 1000), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	live := a.Stats().LiveUnits
	for i, r := range b.MultiDelete(t.Context(), keys) {
		if r.Err != nil {
			t.Fatalf("%s: %v", keys[i], r.Err)
		}
	}
	eventually(t, func() string {
		x, y := a.Stats(), b.Stats()
		if x.ReceivedUnits != live || y.HandedBackUnits != live || y.ForeignUnits != 0 || x.RefusedUnits != 0 {
			return fmt.Sprintf("of %d units %d were handed back and %d received, %d refused, %d are foreign", live,
				y.HandedBackUnits, x.ReceivedUnits, x.RefusedUnits, y.ForeignUnits)
		}
		return ""
	})
	if x := b.Stats(); x.LostUnits != 0 || x.ReceivedUnits != 0 || x.RefusedUnits != 0 {
		t.Errorf("%+v", x)
	}
	for _, c := range []*client.Client{a, b} {
		before := c.Stats()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		after := c.Stats()
		if after.HandedBackUnits < before.HandedBackUnits || after.ReturnedUnits < before.ReturnedUnits+
			before.FreeUnits ||
			after.ReceivedUnits < before.ReceivedUnits || after.MemoryWaits < before.MemoryWaits {
			t.Errorf("before it closed: %+v\nafter: %+v", before, after)
		}
		if again := c.Stats(); fmt.Sprint(again) != fmt.Sprint(after) {
			t.Errorf("closed: %+v\nlater: %+v", after, again)
		}
	}
}
