package fsm

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Limits on tier nodes.
const (
	MaxVolumes   = 1024 // that were not given up
	MaxTierNodes = 64   // of one namespace
	// MinTierBytes is the least that a tier node's files of one namespace may be bound to: four segments.
	MinTierBytes = 256 << 20
	minTiered    = 1 << 10 // bytes of a value, unless a namespace says otherwise
)

// CheckVolume refuses what no tier node may say of itself, with ErrInvalid.
func CheckVolume(v *dirpb.Volume) error {
	if err := checkName("tier node", v.GetName()); err != nil {
		return err
	}
	switch {
	case v.Folder == 0 || v.Boot == 0 || v.Process == 0:
		return fmt.Errorf("%w: tier node %q: folder %d, boot %d, process %d, want none of them 0", ErrInvalid, v.Name,
			v.Folder, v.Boot, v.Process)
	case v.CapacityBytes > MaxCapacityBytes:
		return fmt.Errorf("%w: tier node %q has %s, want at most 1024 TiB", ErrInvalid, v.Name,
			units.Bytes(v.CapacityBytes))
	case len(v.Regions) > MaxPGID:
		return fmt.Errorf("%w: tier node %q has regions of %d namespaces", ErrInvalid, v.Name, len(v.Regions))
	}
	for i, r := range v.Regions {
		if r.GetNamespaceId() == 0 || i > 0 && r.NamespaceId <= v.Regions[i-1].NamespaceId {
			return fmt.Errorf("%w: tier node %q: a region of namespace %d, out of order", ErrInvalid, v.Name,
				r.GetNamespaceId())
		}
	}
	for _, text := range [][2]string{{"host id", v.HostId}, {"domain", v.Domain}, {"version", v.Version}} {
		if err := CheckText(text[0], text[1]); err != nil {
			return fmt.Errorf("tier node %q: %w", v.Name, err)
		}
	}
	return checkEndpoints("tier node", v)
}

// Volume gives a volume or nil.
func (s *State) Volume(id uint32) *dirpb.Volume { return s.volumes[id] }

// Volumes are those that were not given up, by id.
func (s *State) Volumes() []*dirpb.Volume { return ordered.Values(s.volumes) }

// VolumeNamed gives the volume that a tier node has, or nil.
func (s *State) VolumeNamed(name string) *dirpb.Volume {
	for _, v := range s.volumes {
		if v.Name == name {
			return v
		}
	}
	return nil
}

// CheckKeep says why a process may not speak for a volume, nil if it may. Another identity has the tier node, or it has
// another folder or a later process; or the folder was given up, which alone is ErrNotFound.
func (s *State) CheckKeep(v *dirpb.Volume) error {
	if !s.KnowsTiers() {
		return fmt.Errorf("%w: tier nodes begin with level %d, and the directory is at level %d. Start this version "+
			"of kvd on every directory node first", ErrRefused, levelTiers, s.Level())
	}
	if err := errors.Join(CheckVolume(v), CheckText("identity", v.GetIdentity())); err != nil {
		return err
	}
	old := s.VolumeNamed(v.Name)
	for _, x := range s.volumes {
		if x.Folder == v.Folder && x.Name != v.Name {
			return fmt.Errorf("%w: the folder of tier node %q is volume %d of tier node %q", ErrRefused, v.Name, x.Id,
				x.Name)
		}
	}
	switch {
	case v.Id != 0 && old.GetId() != v.Id && !s.gave(v.Id):
		return fmt.Errorf("%w: this directory never gave the id %d to the folder of tier node %q. It was recovered "+
			"without that entry, or is not the folder's. Keep the folder, and give the tier node another one",
			ErrRefused, v.Id, v.Name)
	case v.Id != 0 && old.GetId() != v.Id:
		return fmt.Errorf("volume %d of tier node %q was given up, and what it holds is lost: the tier node needs an "+
			"empty folder: %w", v.Id, v.Name, ErrNotFound)
	case old == nil && len(s.volumes) >= MaxVolumes:
		return fmt.Errorf("%w: there are %d volumes; give up those that are gone: kvctl tier give-up", ErrFull,
			len(s.volumes))
	case old == nil && s.meta.VolumeId == math.MaxUint32:
		return fmt.Errorf("%w: every volume id has been used", ErrFull)
	case old == nil:
		return nil
	case old.Identity != "" && v.Identity != "" && old.Identity != v.Identity:
		return fmt.Errorf("%w: tier node %q belongs to %s, not to %s; give it up first if it is to change hands",
			ErrForeign, v.Name, old.Identity, v.Identity)
	case old.Folder != v.Folder:
		return fmt.Errorf("%w: tier node %q has volume %d, in another folder: start it with that, or give up what is "+
			"there: kvctl tier give-up %s", ErrRefused, v.Name, old.Id, v.Name)
	case v.Boot < old.Boot:
		return fmt.Errorf("%w: boot %d of tier node %q has ended: boot %d is there", ErrRefused, v.Boot, v.Name,
			old.Boot)
	case v.Boot == old.Boot && v.Process != old.Process:
		return fmt.Errorf("%w: tier node %q runs already, or with a copy of its folder", ErrRefused, v.Name)
	}
	return nil
}

// gave reports whether the state gave the id to some volume.
func (s *State) gave(id uint32) bool {
	return id <= s.meta.VolumeId && !slices.ContainsFunc(s.meta.UnknownVolumes, func(r *dirpb.VolumeIds) bool {
		return r.First <= id && id <= r.Last
	})
}

// applyVolume carries out a command on volumes, and gives the id of the one that is kept.
func (s *State) applyVolume(c *fsmpb.Command) (uint32, error) {
	switch op := c.Op.(type) {
	case *fsmpb.Command_SilenceVolume:
		return 0, s.silenceVolume(op.SilenceVolume)
	case *fsmpb.Command_GiveUpVolume:
		return 0, s.giveUpVolume(op.GiveUpVolume)
	default:
		return s.keepVolume(c.GetKeepVolume().GetVolume())
	}
}

// keepVolume takes in what a process of a tier node says, and gives the id of its volume. Regions of namespaces whose
// tier does not name it are left out.
func (s *State) keepVolume(c *dirpb.Volume) (uint32, error) {
	if err := s.CheckKeep(c); err != nil {
		return 0, err
	}
	v := s.AsKept(c)
	switch old := s.VolumeNamed(v.Name); {
	case old == nil:
		m := s.editMeta()
		m.VolumeId++
		v.Id = m.VolumeId
		s.putVolume(v)
	case !proto.Equal(old, v):
		s.putVolume(v)
	}
	return v.Id, nil
}

// AsKept is what the state keeps of what a tier node says. Equal to its volume, it changes nothing.
func (s *State) AsKept(c *dirpb.Volume) *dirpb.Volume {
	old := s.VolumeNamed(c.GetName())
	v := &dirpb.Volume{
		Id: old.GetId(), Name: c.Name, Folder: c.Folder, Boot: c.Boot, Process: c.Process, HostId: c.HostId,
		Domain: c.Domain, Identity: cmp.Or(c.Identity, old.GetIdentity()), Version: c.Version, Endpoints: c.Endpoints,
		CapacityBytes: c.CapacityBytes, State: dirpb.VolumeState_VOLUME_UP,
	}
	for _, r := range c.Regions {
		if names(s.namespaces[r.NamespaceId], v) {
			v.Regions = append(v.Regions, r)
		}
	}
	return v
}

func (s *State) silenceVolume(c *fsmpb.SilenceVolume) error {
	v := s.volumes[c.GetVolumeId()]
	if v == nil || v.Boot != c.Boot || v.State != dirpb.VolumeState_VOLUME_UP {
		return fmt.Errorf("volume %d, boot %d, up: %w", c.GetVolumeId(), c.GetBoot(), ErrNotFound)
	}
	v = proto.CloneOf(v)
	v.State = dirpb.VolumeState_VOLUME_SILENT
	s.putVolume(v)
	return nil
}

// giveUpVolume forgets a volume, and its id says from then on that what it held is lost. A store notes that if its tier
// names the tier node, whatever regions the last process told of. It does so with other copies, too: nothing makes
// one anew, and those may be gone already.
func (s *State) giveUpVolume(c *fsmpb.GiveUpVolume) error {
	v := s.volumes[c.GetVolumeId()]
	if v == nil {
		return fmt.Errorf("volume %d: %w", c.GetVolumeId(), ErrNotFound)
	}
	volumeRows.drop(s, v.Id)
	for _, w := range ordered.Values(s.namespaces) {
		if w.Mode == dirpb.NamespaceMode_NAMESPACE_STORE && names(w, v) {
			s.addLoss(w.Id, &dirpb.Loss{VolumeId: v.Id, UnixMillis: c.UnixMillis, Node: v.Name})
		}
	}
	return nil
}

// names reports whether the tier of a namespace names the tier node that has a volume.
func names(w *dirpb.Namespace, v *dirpb.Volume) bool {
	return slices.Contains(w.GetTier().GetNodes(), v.Name)
}

func holds(v *dirpb.Volume, namespace uint32) bool {
	_, ok := slices.BinarySearchFunc(v.Regions, namespace, func(r *dirpb.VolumeRegion, id uint32) int {
		return cmp.Compare(r.NamespaceId, id)
	})
	return ok
}

// dropVolumeRegions forgets what volumes hold of a namespace that goes.
func (s *State) dropVolumeRegions(namespace uint32) {
	for _, v := range ordered.Values(s.volumes) {
		if holds(v, namespace) {
			v = proto.CloneOf(v)
			v.Regions = slices.DeleteFunc(v.Regions, func(r *dirpb.VolumeRegion) bool {
				return r.NamespaceId == namespace
			})
			s.putVolume(v)
		}
	}
}

// volumesFor are the volumes as a session of a namespace sees them: those of its tier's nodes, without what is
// operators' alone. If there is no region, the process has not opened the files yet. A volume that is not there was
// given up. For 0 they are all, without rkeys.
func (s *State) volumesFor(namespace uint32) (out []*dirpb.Volume) {
	for _, v := range ordered.Values(s.volumes) {
		if namespace != 0 && !names(s.namespaces[namespace], v) {
			continue
		}
		v = proto.CloneOf(v)
		v.Regions = slices.DeleteFunc(v.Regions, func(r *dirpb.VolumeRegion) bool {
			return namespace != 0 && r.NamespaceId != namespace
		})
		if namespace == 0 {
			for _, r := range v.Regions {
				r.Rkey = 0
			}
		} else {
			v.Folder, v.Process, v.Identity, v.Version, v.CapacityBytes = 0, 0, "", "", 0
		}
		out = append(out, v)
	}
	return out
}

// TierWork is a volume's part in the namespaces whose tier names it, by id.
func (s *State) TierWork(volume uint32) (out []*dirpb.TierWork) {
	v := s.volumes[volume]
	for _, w := range ordered.Values(s.namespaces) {
		t := w.GetTier()
		if v == nil || w.Deleting || !names(w, v) {
			continue
		}
		work := &dirpb.TierWork{NamespaceId: w.Id, Namespace: w.Name, HashSeed: w.HashSeed, Mode: w.Mode, Tier: t,
			LimitBytes: t.Bytes / uint64(len(t.Nodes))}
		for _, x := range ordered.Values(s.volumes) {
			if x.State == dirpb.VolumeState_VOLUME_UP && holds(x, w.Id) {
				work.Volumes = append(work.Volumes, x.Id)
			}
		}
		out = append(out, work)
	}
	return out
}

// tierOf is t as w keeps it; nil: w keeps the one that it has, if any. Below the level of tiers nothing is asked for,
// as earlier versions read it.
func (s *State) tierOf(w *dirpb.Namespace, t *dirpb.Tier) *dirpb.Tier {
	if t == nil || !s.KnowsTiers() {
		return w.Tier
	}
	t = proto.CloneOf(t)
	slices.Sort(t.Nodes)
	if t.Copies == 0 {
		if t.Copies = 1; w.Mode == dirpb.NamespaceMode_NAMESPACE_STORE {
			t.Copies = w.Replicas
		}
	}
	if t.MinBytes == 0 {
		t.MinBytes = minTiered
	}
	return t
}

// checkTier returns why w, which may be about to be made, cannot have a tier as t says; nil: it may, or none is asked
// for.
func (s *State) checkTier(w *dirpb.Namespace, t *dirpb.Tier) error {
	if t == nil || !s.KnowsTiers() {
		return nil
	}
	if n := len(t.Nodes); n == 0 || n > MaxTierNodes {
		return fmt.Errorf("%w: a tier of %d tier nodes for namespace %q, want 1..%d; a namespace that has a tier "+
			"keeps one", ErrInvalid, n, w.Name, MaxTierNodes)
	}
	t = s.tierOf(w, t)
	domains := make(map[string]bool)
	labelled := false
	for i, name := range t.Nodes {
		v := s.VolumeNamed(name)
		switch {
		case i > 0 && t.Nodes[i-1] == name:
			return fmt.Errorf("%w: tier node %.64q is named twice for namespace %q", ErrInvalid, name, w.Name)
		case v == nil && !slices.Contains(w.GetTier().GetNodes(), name):
			return fmt.Errorf("tier node %.64q for namespace %q: %w", name, w.Name, ErrNotFound)
		}
		if v == nil {
			continue // it was given up, and nobody knows where it comes back
		}
		domains[v.Domain] = true
		labelled = labelled || v.Domain != ""
	}
	switch least := uint64(len(t.Nodes)) * MinTierBytes; {
	case int(t.Copies) > len(t.Nodes) || t.Copies > MaxReplicas:
		return fmt.Errorf("%w: %d copies in the tier of namespace %q, which has %d tier nodes, want 1..%d", ErrInvalid,
			t.Copies, w.Name, len(t.Nodes), min(len(t.Nodes), MaxReplicas))
	case t.Copies > 1 && w.Mode == dirpb.NamespaceMode_NAMESPACE_CACHE:
		return fmt.Errorf("%w: %d copies in the tier of the cache %q, want 1", ErrInvalid, t.Copies, w.Name)
	case labelled && len(domains) < int(t.Copies):
		return fmt.Errorf("%w: %d copies in the tier of namespace %q need as many failure domains; its tier nodes are "+
			"in %d", ErrRefused, t.Copies, w.Name, len(domains))
	case t.Bytes != 0 && t.Bytes < least || t.Bytes > MaxCapacityBytes:
		return fmt.Errorf("%w: %s for the tier of namespace %q on %d tier nodes, want %s..1PiB", ErrInvalid,
			units.Bytes(t.Bytes), w.Name, len(t.Nodes), units.Bytes(least))
	case t.MinBytes > layout.MaxValueLen:
		return fmt.Errorf("%w: values from %s on in the tier of namespace %q, want at most %s", ErrInvalid,
			units.Bytes(t.MinBytes), w.Name, units.Bytes(uint64(layout.MaxValueLen)))
	}
	for _, name := range w.GetTier().GetNodes() {
		if v := s.VolumeNamed(name); v != nil && !slices.Contains(t.Nodes, name) {
			return fmt.Errorf("%w: values of namespace %q are on tier node %q, which can leave its tier only once it "+
				"is given up: kvctl tier give-up %s", ErrRefused, w.Name, name, name)
		}
	}
	if w.Tier != nil {
		return nil
	}
	return s.checkStubs(w)
}

// checkStubs refuses a tier to a namespace with sessions that could not read what is there.
func (s *State) checkStubs(w *dirpb.Namespace) error {
	var without []string
	for _, x := range ordered.Values(s.sessions) {
		if w.Id != 0 && x.NamespaceId == w.Id && !x.KnowsStubs {
			without = append(without, fmt.Sprintf("%d %.64q", x.Id, x.Client))
		}
	}
	if n := len(without); n > 0 {
		list := strings.Join(without[:min(n, maxNamed)], ", ")
		if n > maxNamed {
			list += ", …"
		}
		return fmt.Errorf("%w: namespace %q has %d sessions that cannot read what is on tier nodes (%s). Run a later "+
			"version of these clients; sessions from before level %d have to be opened anew", ErrRefused, w.Name, n,
			list, levelTiers)
	}
	return nil
}

func (s *State) checkVolume(v *dirpb.Volume) error {
	if err := CheckVolume(v); err != nil {
		return fmt.Errorf("%d: %w", v.Id, err)
	}
	if v.State != dirpb.VolumeState_VOLUME_UP && v.State != dirpb.VolumeState_VOLUME_SILENT {
		return fmt.Errorf("%d: state %d", v.Id, v.State)
	}
	for _, r := range v.Regions {
		if s.namespaces[r.NamespaceId] == nil {
			return fmt.Errorf("%d: its namespace %d is missing", v.Id, r.NamespaceId)
		}
	}
	for _, x := range s.volumes {
		if x.Id != v.Id && (x.Name == v.Name || x.Folder == v.Folder) {
			return fmt.Errorf("%d: volume %d is of tier node %q, too, or of the same folder", v.Id, x.Id, x.Name)
		}
	}
	return nil
}
