package gateway

import (
	"context"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/live"
)

// planHost is a connection as the host of a plan: the gateway's databases, and memory of the connection's share.
type planHost struct{ c *conn }

// planLimits are those of a batch.
var planLimits = exec.Limits{OneLimit: oneLimit, EachLimit: eachLimit, Few: freeUnits, AtOnce: maxUnits,
	Tries: largeTries, ReadCost: readCost, WriteCost: writeCost,
	PutCost: putCost}

func (h planHost) API(db int) client.API { return h.c.g.dbs[db].api }

func (h planHost) Together(a, b int) bool { return h.c.g.dbs[a].shared == h.c.g.dbs[b].shared }

func (h planHost) Prepare(k *exec.Key) {
	k.Stored = h.c.g.dbs[k.DB].appendStored(k.Stored, k.Name)
	k.MaxValue, k.Limits = h.c.g.o.MaxValueBytes, &h.c.g.encodings
	k.Quiet = isLibraries(k.Name)
}

func (h planHost) Refuses(n exec.KeyName) error { return badKey(&h.c.g.dbs[n.DB], n.Name) }

func (h planHost) Take(n int64) error { return h.c.take(n) }

func (h planHost) Drop(n int64) { h.c.share.Drop(n) }

func (h planHost) Context(many bool) context.Context {
	if many {
		return h.c.smallCtx
	}
	return h.c.ctx
}

// Begins enters keys that the client caches before they are read; the returned function, called when they have been,
// remembers their versions.
func (h planHost) Begins(keys []*exec.Key) (read func(err error)) {
	c := h.c
	if !c.tracksReads() || keys[0].Quiet { // which is read alone
		return func(error) {}
	}
	c.out.cork()
	for _, k := range keys {
		c.g.tracked.Enter(&c.box, &c.listener, k.DB, []byte(k.Name))
	}
	return func(err error) {
		for _, k := range keys {
			version := k.Version
			if err != nil {
				version = live.UnknownVersion
			}
			c.g.tracked.SetVersion(&c.box, &c.listener, k.DB, []byte(k.Name), version)
		}
	}
}

func (h planHost) Sees(n exec.KeyName) { h.c.sees(n) }

func (h planHost) Rest(d time.Duration) bool { return h.c.g.pause(d) }
