package gateway

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/hotkeys"
)

func hotGateway() (*Gateway, *conn) {
	dbs := []Database{{"a", clienttest.New(clienttest.Options{})}, {"b", clienttest.New(clienttest.Options{})}}
	g := &Gateway{o: Options{Databases: dbs}, dbs: placeDatabases(dbs), hot: hotkeys.New()}
	return g, &conn{g: g}
}

// Of many keys those that are used most are told, with their shares, whichever commands they are used by; others are
// not.
func TestHotKeys(t *testing.T) {
	g, c := hotGateway()
	random := rand.New(rand.NewPCG(1, 2))
	get, del := find([]byte("get")), find([]byte("del"))
	const commands = 3_000_000
	for range commands {
		key := fmt.Sprint("key ", random.IntN(100_000))
		switch n := random.IntN(100); {
		case n < 20:
			key = "hot"
		case n < 25:
			key = "warm"
		}
		c.db = 1
		if random.IntN(2) == 0 {
			c.countHot(get, [][]byte{[]byte("get"), []byte(key)})
		} else {
			c.countHot(del, [][]byte{[]byte("del"), []byte(key), []byte("other " + key)})
		}
	}
	all := g.HotKeys()
	if len(all) < 2 || all[0].Database != "b" || all[0].Key != "hot" {
		t.Fatalf("got %+v", all)
	}
	// Half of the commands have two keys: of three uses two are of the key itself.
	for key, want := range map[string]float64{"hot": 0.2 * 2 / 3, "warm": 0.05 * 2 / 3, "other hot": 0.2 / 3,
		"other warm": 0.05 / 3} {
		found := false
		for _, x := range all {
			if x.Key == key {
				found = x.Least <= want*1.3 && x.Share >= want*0.7 && x.Least > want*0.4
			}
		}
		if !found {
			t.Errorf("%s: no share of about %.3f: %+v", key, want, all)
		}
	}
	for _, x := range all {
		if strings.HasPrefix(x.Key, "key ") && x.Least > 0.01 {
			t.Errorf("%+v is not hot", x)
		}
	}
}

// However many and however long keys are, the memory is bounded; old uses are forgotten; and by itself nothing is
// counted.
func TestHotKeysAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := hotGateway()
		set := find([]byte("mset"))
		args := [][]byte{[]byte("mset")}
		for i := range 10_000 {
			args = append(args, []byte(strings.Repeat(fmt.Sprint(i, " "), 1000)), nil)
		}
		for range 100 * hotkeys.Every {
			c.countHot(set, args)
		}
		if n := g.hot.Counted(); n > hotkeys.Most || n == 0 {
			t.Errorf("%d keys are counted", n)
		}
		for _, x := range g.HotKeys() {
			if len(x.Key) > hotkeys.MaxKey {
				t.Errorf("a key of %d bytes", len(x.Key))
			}
		}
		time.Sleep(20 * time.Minute)
		if all := g.HotKeys(); len(all) > 0 || g.hot.Counted() > 0 {
			t.Errorf("long after: %+v", all)
		}
		none := &conn{g: &Gateway{}}
		none.countHot(set, args)
		if all := (&Gateway{}).HotKeys(); all != nil {
			t.Errorf("nobody asked for %+v", all)
		}
	})
}

// Each command is as likely to be looked at as any other, also of connections that say little.
func TestHotKeysSample(t *testing.T) {
	for _, length := range []int{1, 5, 10_000} { // commands of a connection
		const all = 2_000_000
		seen := 0
		for range all / length {
			var c conn
			for range length {
				if c.sampled() {
					seen++
				}
			}
		}
		// Of short ones half as many are: a gap is uniform up to twice its mean.
		if share := float64(seen) / all * hotkeys.Every; share < 0.4 || share > 1.1 {
			t.Errorf("connections of %d commands: %.2f of what is meant", length, share)
		}
	}
}

// BenchmarkHotKeys is what counting hot keys adds to a command.
func BenchmarkHotKeys(b *testing.B) {
	_, c := hotGateway()
	get := find([]byte("get"))
	var keys [4096][][]byte
	for i := range keys {
		keys[i] = [][]byte{[]byte("get"), []byte(fmt.Sprint("key ", i))}
	}
	for i := 0; b.Loop(); i++ {
		c.countHot(get, keys[i%len(keys)])
	}
}
