package config

import "time"

// Archive are the settings of `kvd archive`.
type Archive struct {
	Directory  []string `mapstructure:"directory" usage:"addresses of directory nodes, host:port"`
	Namespaces []string `mapstructure:"namespaces" usage:"namespaces to make snapshots of; empty: all that there are"`

	// Where snapshots go, how often, and which stay.
	To         string        `mapstructure:"to" usage:"where snapshots go, file:///FOLDER or s3://BUCKET/PREFIX. Several archives may share it: one works, and another takes over when that is silent for a minute"`
	Every      time.Duration `mapstructure:"every" usage:"time from the begin of a namespace's snapshot to that of its next"`
	Rate       Size          `mapstructure:"rate" usage:"bytes of values to read a second; 0: no bound"`
	KeepLast   int           `mapstructure:"keep-last" usage:"how many of the newest snapshots of a namespace stay. Without any of the three, all do"`
	KeepHourly int           `mapstructure:"keep-hourly" usage:"of how many hours that have any the newest snapshot stays"`
	KeepDaily  int           `mapstructure:"keep-daily" usage:"of how many days that have any the newest snapshot stays"`

	// How memory nodes are reached, as for every client.
	Provider   string `mapstructure:"provider" usage:"force a provider to reach memory nodes by; empty: the best that both ends have"`
	Require    string `mapstructure:"require" usage:"rdma: reach memory nodes by RDMA alone, and fail with the reason where that cannot be; empty: by what there is"`
	RDMADevice string `mapstructure:"rdma-device" usage:"RDMA adapter: NAME, NAME/PORT or NAME/PORT/GIDINDEX; empty: the best. Several, with commas between, are all used"`

	// As for every daemon.
	HTTPListen string   `mapstructure:"http-listen" usage:"address where metrics, health and a page for people are served, host:port, or off"`
	RDMA       RDMA     `mapstructure:"rdma"`
	TLS        TLS      `mapstructure:"tls"`
	Identity   Identity `mapstructure:"identity"`
	Insecure   bool     `mapstructure:"insecure" usage:"talk beyond this machine without TLS"`
	Log        Log      `mapstructure:"log"`
}

// DefaultArchive gives what `kvd archive` adds to its required settings.
func DefaultArchive() *Archive {
	return &Archive{Directory: []string{DefaultDirectory}, Namespaces: []string{}, Every: 15 * time.Minute,
		HTTPListen: Off, Identity: Identity{Units: []string{}}, Log: defaultLog}
}

// Bounds of kvd archive.
const (
	maxKeep        = 1_000_000
	maxArchiveRate = Size(1 << 50)
)

// Validate implements [Settings].
func (a *Archive) Validate() error {
	var c checker
	clear := a.Insecure || a.TLS != (TLS{})
	c.directory(a.Directory, clear)
	c.required("to", a.To, "say where snapshots go, file:///FOLDER or s3://BUCKET/PREFIX")
	c.least("every", a.Every, time.Second)
	if a.Rate > maxArchiveRate {
		c.bad("rate", a.Rate, "want at most %v", maxArchiveRate)
	}
	for _, k := range []struct {
		key string
		n   int
	}{{"keep-last", a.KeepLast}, {"keep-hourly", a.KeepHourly}, {"keep-daily", a.KeepDaily}} {
		if k.n < 0 || k.n > maxKeep {
			c.bad(k.key, k.n, "want 0 to %d", maxKeep)
		}
	}
	c.http(a.HTTPListen, clear)
	c.tls(a.TLS)
	c.identity(a.Identity)
	c.log(a.Log)
	return c.err()
}
