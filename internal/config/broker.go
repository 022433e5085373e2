package config

import (
	"path/filepath"
	"time"
)

// Broker are the settings of `kvd broker`.
type Broker struct {
	Directory  []string `mapstructure:"directory" usage:"addresses of directory nodes, host:port"`
	Namespaces []string `mapstructure:"namespaces" usage:"namespaces that programs may name; the first is for those that name none"`

	// The programs that may connect, and how much these may use.
	Listen      string        `mapstructure:"listen" usage:"path of the socket that programs of this machine connect to"`
	Users       []string      `mapstructure:"users" usage:"users who may connect, by name or number; empty: this process's own, and root"`
	SecretFile  string        `mapstructure:"secret-file" usage:"file whose only line programs must say, for containers in which users mean nothing; empty: nothing"`
	MaxClients  int           `mapstructure:"max-clients" usage:"how many programs may be connected at a time"`
	MaxPins     int           `mapstructure:"max-pins" usage:"how many keys programs may pin at a time. A pin counts until its time is over, also if its key is unpinned or pinned again"`
	ArenaMemory Size          `mapstructure:"arena-memory" usage:"memory that programs may share with the broker, together. It is theirs, and pinned if an adapter needs that"`
	Timeout     time.Duration `mapstructure:"timeout" usage:"time of an operation for which the program names none"`
	ViewMemory  Size          `mapstructure:"view-memory" usage:"bytes of values that programs may view in place, together. A program with a view can read all of the region that the value lies in; 0: there are no views"`
	Views       int           `mapstructure:"views" usage:"how many views there may be at a time"`
	Mirror      Size          `mapstructure:"mirror" usage:"memory, for each namespace, of images of the index: a key not used before is then read in one round trip. A key takes 9 to 13 bytes; 0: none"`

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

// DefaultBrokerNode gives `kvd broker` without any settings.
func DefaultBrokerNode() *Broker {
	return &Broker{
		Directory: []string{DefaultDirectory}, Namespaces: []string{"default"}, Listen: DefaultBroker,
		Users: []string{}, MaxClients: 64, MaxPins: 1 << 20, ArenaMemory: 16 << 30, Timeout: 10 * time.Second,
		Views:      64,
		HTTPListen: Off,
		Identity:   Identity{Units: []string{}}, Log: defaultLog,
	}
}

// Validate implements [Settings].
func (b *Broker) Validate() error {
	var c checker
	clear := b.Insecure || b.TLS != (TLS{})
	c.directory(b.Directory, clear)
	if len(b.Namespaces) == 0 {
		c.required("namespaces", "", "name a namespace at least, such as default")
	}
	if !filepath.IsAbs(b.Listen) {
		c.bad("listen", b.Listen, "want an absolute path")
	}
	c.socket("listen", b.Listen)
	if b.MaxClients < 1 || b.MaxClients > maxBrokerClients {
		c.bad("max-clients", b.MaxClients, "want 1 to %d", maxBrokerClients)
	}
	if b.MaxPins < 1 || b.MaxPins > maxBrokerPins {
		c.bad("max-pins", b.MaxPins, "want 1 to %d", maxBrokerPins)
	}
	if b.ArenaMemory < 1<<20 || b.ArenaMemory > maxMemory {
		c.bad("arena-memory", b.ArenaMemory, "want %v to %v", Size(1<<20), maxMemory)
	}
	c.least("timeout", b.Timeout, 10*time.Millisecond)
	if b.ViewMemory > maxMemory {
		c.bad("view-memory", b.ViewMemory, "want at most %v", maxMemory)
	}
	if b.Views < 1 || b.Views > maxBrokerViews {
		c.bad("views", b.Views, "want 1 to %d", maxBrokerViews)
	}
	c.mirror(b.Mirror)
	c.http(b.HTTPListen, clear)
	c.tls(b.TLS)
	c.identity(b.Identity)
	c.log(b.Log)
	return c.err()
}
