package archive

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// ManifestName is the file that makes a folder a snapshot. It is the last to be written.
const ManifestName = "MANIFEST.json"

// Manifest says what a snapshot is of and which files it has. Fields that a reader does not know are let pass: a
// change that must be understood gets another Format.
type Manifest struct {
	Format string `json:"format"`
	ID     string `json:"id"`
	// Base is the id of the snapshot that this one goes on from; "": it is whole.
	Base        string    `json:"base"`
	Cluster     string    `json:"cluster"`
	Namespace   Namespace `json:"namespace"`
	Consistency string    `json:"consistency"`
	// T0 and T1 are when it was begun and ended, by the clock of who made it. Each record was the state of its key at
	// some moment between them.
	T0 time.Time `json:"t0"`
	T1 time.Time `json:"t1"`
	// Map is the version of the directory's map at T0.
	Map  uint64 `json:"map_version"`
	Keys int64  `json:"keys"`
	// Bytes are those of keys and values.
	Bytes int64 `json:"bytes"`
	// LeftOut is how many keys, or places with keys, could not be read since they are damaged.
	LeftOut  int64         `json:"left_out"`
	Segments []SegmentInfo `json:"segments"`
	Writer   string        `json:"writer"`
}

// Namespace is what a snapshot tells of the namespace it is of.
type Namespace struct {
	Name         string `json:"name"`
	Mode         string `json:"mode"`
	Replicas     uint32 `json:"replicas"`
	LimitBytes   uint64 `json:"limit_bytes"`
	Shards       int    `json:"shards"`
	MaxValue     uint64 `json:"max_value_bytes"`
	BytesPerNode uint64 `json:"bytes_per_node"`
}

// ManifestOf is what a directory's status says of a namespace; false: there is none. Create adds the rest.
func ManifestOf(st *dirpb.StatusReply, name, writer string) (Manifest, bool) {
	all := st.GetMap().GetNamespaces()
	i := slices.IndexFunc(all, func(ns *dirpb.Namespace) bool { return ns.GetName() == name })
	if i < 0 {
		return Manifest{}, false
	}
	ns := all[i]
	m := Manifest{Cluster: st.GetClusterId(), Map: st.GetMap().GetVersion(), Writer: writer, Namespace: Namespace{
		Name: name, Mode: strings.ToLower(strings.TrimPrefix(ns.GetMode().String(), "NAMESPACE_")),
		Replicas: ns.GetReplicas(), LimitBytes: ns.GetLimitBytes(), MaxValue: ns.GetMaxValueBytes(),
		BytesPerNode: ns.GetBytesPerNode()}}
	for _, g := range st.GetMap().GetShards() {
		if g.GetNamespaceId() == ns.GetId() {
			m.Namespace.Shards++
		}
	}
	return m, true
}

// SegmentInfo is a file of records. CRC is the CRC-32C of all of it.
type SegmentInfo struct {
	Name    string `json:"name"`
	Bytes   int64  `json:"bytes"`
	Records int64  `json:"records"`
	CRC     uint32 `json:"crc32c"`
}

// PerKey is the Consistency of a snapshot that equals single reads of its keys.
const PerKey = "per-key"

// sumStart begins the last field, which has the CRC-32C of all before it.
const sumStart = `,"crc32c":"`

// sumLen is the length of the last field and of what ends a manifest, in bytes.
const sumLen = len(sumStart) + 8 + len("\"}\n")

// encode is the manifest as it is written.
func (m *Manifest) encode() ([]byte, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	b = b[:len(b)-1]
	return fmt.Appendf(b, "%s%08x\"}\n", sumStart, crc32.Checksum(b, castagnoli)), nil
}

// parseManifest reads the manifest of snapshot id of a namespace.
func parseManifest(b []byte, namespace, id string) (*Manifest, error) {
	if len(b) < sumLen {
		return nil, fmt.Errorf("%d bytes are too few", len(b))
	}
	body, end := b[:len(b)-sumLen], b[len(b)-sumLen:]
	if want := fmt.Sprintf("%s%08x\"}\n", sumStart, crc32.Checksum(body, castagnoli)); string(end) != want {
		return nil, fmt.Errorf("it ends with %q, and what is before that wants %q", end, want)
	}
	m := new(Manifest)
	d := json.NewDecoder(bytes.NewReader(append(bytes.Clone(body), '}')))
	if err := d.Decode(m); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err == nil {
		return nil, errors.New("something follows the JSON value")
	}
	return m, m.check(namespace, id)
}

func (m *Manifest) check(namespace, id string) error {
	switch {
	case m.Format != Format:
		return fmt.Errorf("format %.40q, and this version reads %s", m.Format, Format)
	case m.ID != id || m.Namespace.Name != namespace:
		return fmt.Errorf("it is of snapshot %.80q of namespace %.80q, and lies where %s of %s should be", m.ID,
			m.Namespace.Name, id, namespace)
	case m.Base != "":
		return fmt.Errorf("it goes on from snapshot %.80q, and this version reads whole ones only", m.Base)
	case m.Consistency != PerKey:
		return fmt.Errorf("consistency %.40q, and this version reads %s", m.Consistency, PerKey)
	case len(m.Segments) > maxSegments:
		return fmt.Errorf("%d segments, at most %d", len(m.Segments), maxSegments)
	case m.Keys < 0 || m.Bytes < 0 || m.LeftOut < 0:
		return errors.New("a count is negative")
	}
	seen, records := make(map[string]bool, len(m.Segments)), int64(0)
	for i, s := range m.Segments {
		switch {
		case !segmentForm.MatchString(s.Name):
			return fmt.Errorf("segment %d: %.80q is no name of a segment", i, s.Name)
		case seen[s.Name]:
			return fmt.Errorf("segment %d: %s is there twice", i, s.Name)
		case s.Bytes < headerSize || s.Bytes > longestSegment:
			return fmt.Errorf("segment %d: %d bytes, want %d..%d", i, s.Bytes, headerSize, longestSegment)
		case s.Records < 1 || s.Records > longestSegment*MaxBlock/headerSize:
			return fmt.Errorf("segment %d: %d records", i, s.Records)
		}
		seen[s.Name] = true
		records += s.Records
	}
	if records != m.Keys {
		return fmt.Errorf("segments have %d records, and %d keys are told of", records, m.Keys)
	}
	return nil
}
