package metrics

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/certs"
)

var (
	tlsExpiry = prometheus.NewDesc("kvd_tls_certificate_expiry_seconds",
		"Seconds until a certificate in use expires, negative afterwards. Those are the process's own, those that "+
			"come with it, its authorities', and lists of revoked certificates. The serial of a list is its number.",
		[]string{"file", "identity", "serial"}, nil)
	tlsReloads = prometheus.NewDesc("kvd_tls_reloads_total",
		"Changed files of certificates, by result: taken, or refused (counted every second while they stay unusable; "+
			"those in use are kept).", []string{"file", "result"}, nil)
)

// TLS shows certificates in use and how their files were taken over. sources may give others each time.
func TLS(sources func() []*certs.Source) prometheus.Collector { return tlsCollector(sources) }

type tlsCollector func() []*certs.Source

func (c tlsCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- tlsExpiry
	ch <- tlsReloads
}

func (c tlsCollector) Collect(ch chan<- prometheus.Metric) {
	type series struct{ file, serial string }
	shown := make(map[series]bool) // two listeners may have the same files
	taken, refused := make(map[string]uint64), make(map[string]uint64)
	now := time.Now()
	for _, s := range c() {
		for _, h := range s.InUse() {
			k := series{h.File, h.Serial}
			if shown[k] {
				continue
			}
			shown[k] = true
			ch <- prometheus.MustNewConstMetric(tlsExpiry, prometheus.GaugeValue, h.NotAfter.Sub(now).Seconds(),
				text(h.File), text(h.Identity), k.serial)
		}
		file := s.Files().Cert
		taken[file] += s.Taken()
		refused[file] += s.Refused()
	}
	for file := range taken {
		ch <- prometheus.MustNewConstMetric(tlsReloads, prometheus.CounterValue, float64(taken[file]), text(file),
			"taken")
		ch <- prometheus.MustNewConstMetric(tlsReloads, prometheus.CounterValue, float64(refused[file]), text(file),
			"refused")
	}
}

// text is s as a label can have it.
func text(s string) string { return strings.ToValidUTF8(s, "?") }
