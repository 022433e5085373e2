package config

// Tier are the settings of `kvd tier`.
type Tier struct {
	Name      string   `mapstructure:"name" usage:"this tier node's name, by which namespaces name it"`
	Directory []string `mapstructure:"directory" usage:"addresses of directory nodes, host:port"`
	Folder    string   `mapstructure:"folder" usage:"folder for the files, which nobody else uses; made if it is missing"`
	Size      Size     `mapstructure:"size" usage:"bytes that the files may take; of each namespace, unless that has a bound of its own"`
	Domain    string   `mapstructure:"domain" usage:"failure domain, such as a rack; copies go to different ones"`

	// As for a memory node.
	ListenTCP      string   `mapstructure:"listen-tcp" usage:"address where the tcp provider listens, host:port"`
	AdvertiseTCP   string   `mapstructure:"advertise-tcp" usage:"what clients dial instead of listen-tcp: a host, or host:port"`
	MaxConnections int      `mapstructure:"max-connections" usage:"how many connections to listen-tcp may be open at a time"`
	MaxPerAddress  int      `mapstructure:"max-connections-per-address" usage:"how many of them one address may have, other than this machine; 0: three quarters"`
	HTTPListen     string   `mapstructure:"http-listen" usage:"address where metrics, health and a page for people are served, host:port, or off"`
	TLS            TLS      `mapstructure:"tls"`
	Identity       Identity `mapstructure:"identity"`
	Insecure       bool     `mapstructure:"insecure" usage:"talk beyond this machine without TLS"`
	Log            Log      `mapstructure:"log"`
}

// DefaultTier gives what `kvd tier` adds to its required settings.
func DefaultTier() *Tier {
	return &Tier{Directory: []string{DefaultDirectory}, Size: 64 << 30, ListenTCP: "127.0.0.1:0",
		MaxConnections: 20_000, HTTPListen: Off, Identity: Identity{Units: []string{}}, Log: defaultLog}
}

// Bounds of the files of a tier node.
const (
	minTierSize Size = 256 << 20
	maxTierSize Size = 1 << 50
)

// Validate implements [Settings].
func (t *Tier) Validate() error {
	var c checker
	clear := t.Insecure || t.TLS != (TLS{})
	c.required("name", t.Name, "name this tier node, such as t1")
	c.directory(t.Directory, clear)
	c.required("folder", t.Folder, "give a folder on a disk")
	if t.Size < minTierSize || t.Size > maxTierSize {
		c.bad("size", t.Size, "want %v to %v", minTierSize, maxTierSize)
	}
	c.listen("listen-tcp", t.ListenTCP, "advertise-tcp", t.AdvertiseTCP, clear)
	c.connections(t.MaxConnections, t.MaxPerAddress)
	c.http(t.HTTPListen, clear)
	c.tls(t.TLS)
	c.identity(t.Identity)
	c.log(t.Log)
	return c.err()
}
