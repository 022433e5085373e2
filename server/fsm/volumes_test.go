package fsm

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// volume is what the first process of a tier node says, with regions of these namespaces.
func volume(name string, boot uint64, namespaces ...uint32) *dirpb.Volume {
	v := &dirpb.Volume{Name: name, Folder: uint64(name[1]), Boot: boot, Process: boot + 100, CapacityBytes: 1 << 40,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: name + ":1"}}}
	for _, id := range namespaces {
		v.Regions = append(v.Regions, &dirpb.VolumeRegion{NamespaceId: id, Rkey: uint64(id) + 7, Bytes: 1 << 40})
	}
	return v
}

func keep(v *dirpb.Volume) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_KeepVolume{KeepVolume: &fsmpb.KeepVolume{Volume: v}}}
}

func silence(id uint32, boot uint64) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_SilenceVolume{SilenceVolume: &fsmpb.SilenceVolume{VolumeId: id,
		Boot: boot}}}
}

func giveUp(id uint32) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_GiveUpVolume{GiveUpVolume: &fsmpb.GiveUpVolume{VolumeId: id,
		UnixMillis: 9}}}
}

func deleteNamespace(name string) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_DeleteNamespace{DeleteNamespace: &dirpb.DeleteNamespaceRequest{Name: name,
		EndSessions: true}}}
}

func tierSet(namespace string, t *dirpb.Tier) *dirpb.SetNamespaceRequest {
	return &dirpb.SetNamespaceRequest{Name: namespace, KeepLimit: true, Tier: t}
}

func openKnowing(namespace uint32) *fsmpb.Command {
	return openAs(&fsmpb.OpenSession{NamespaceId: namespace, KnowsStubs: true})
}

// tiered is two memory nodes, tier nodes t1 and t2, the store cold (1) with both of them and the cache warm (2) with
// t1.
func tiered(t tester) *harness {
	h := cluster(t, 2, nil)
	h.do(keep(volume("t1", 1)))
	h.do(keep(volume("t2", 1)))
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "cold", Replicas: 1, BytesPerNode: 1 << 26,
		Tier: &dirpb.Tier{Nodes: []string{"t2", "t1"}, Bytes: 1 << 30}}))
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "warm", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1,
		BytesPerNode: 1 << 26}))
	h.do(openKnowing(2))
	h.do(set(tierSet("warm", &dirpb.Tier{Nodes: []string{"t1"}})))
	h.do(keep(volume("t1", 1, 1, 2)))
	h.do(keep(volume("t2", 1, 1)))
	h.activate()
	return h
}

// A volume has one id for as long as its folder is there, whichever process has it; an id that was given up is not
// given out again.
func TestVolumeLife(t *testing.T) {
	h := newHarness(t)
	id := h.do(keep(volume("t1", 1))).VolumeID
	if id != 1 {
		t.Fatalf("volume %d", id)
	}
	version := h.s.MapVersion()
	if again := h.do(keep(volume("t1", 1))); again.VolumeID != id || len(again.Changes) > 0 ||
		h.s.MapVersion() != version {
		t.Fatalf("said again: %+v", again)
	}
	copied := volume("t1", 1)
	copied.Process++
	h.refuse(keep(copied), ErrRefused, "runs already, or with a copy of its folder")
	if next := h.do(keep(volume("t1", 2))); next.VolumeID != id || h.s.Volume(id).Boot != 2 {
		t.Fatalf("the next process: %+v", next)
	}
	h.refuse(keep(volume("t1", 1)), ErrRefused, "boot 1 of tier node", "has ended")
	h.refuse(silence(id, 1), ErrNotFound)
	h.do(silence(id, 2))
	h.refuse(silence(id, 2), ErrNotFound)
	if v := h.s.Volume(id); v.State != dirpb.VolumeState_VOLUME_SILENT {
		t.Fatalf("%v", v)
	}
	if h.do(keep(volume("t1", 2))); h.s.Volume(id).State != dirpb.VolumeState_VOLUME_UP {
		t.Fatal("a volume that is heard again stays silent")
	}

	other := volume("t1", 1)
	other.Folder++
	h.refuse(keep(other), ErrRefused, "in another folder", "kvctl tier give-up t1")
	renamed := volume("t2", 3)
	renamed.Folder = volume("t1", 1).Folder
	h.refuse(keep(renamed), ErrRefused, "is volume 1 of tier node \"t1\"")
	h.checkCopies()

	h.do(giveUp(id))
	h.refuse(giveUp(id), ErrNotFound)
	back := volume("t1", 3)
	back.Id = id
	h.refuse(keep(back), ErrNotFound, "was given up", "needs an empty folder")
	if next := h.do(keep(other)); next.VolumeID != 2 {
		t.Fatalf("volume %d", next.VolumeID)
	}
	if m := h.s.Map(nil); m.LastVolume != 2 || len(m.Volumes) != 1 {
		t.Fatalf("%v", m)
	}
	h.checkCopies()
}

// A volume whose registration a recovery did without was not given up, and its id is nobody else's.
func TestRecoveredVolumes(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(levelTiers))
	h.do(keep(volume("t1", 1)))
	h.do(keep(volume("t2", 1)))
	h.do(&fsmpb.Command{Op: &fsmpb.Command_PutDirectory{PutDirectory: &fsmpb.PutDirectory{
		Directory: &fsmpb.Directory{Id: "d1", RaftAddr: "h:1", GrpcAddr: "h:2"}}}})
	lost := volume("t3", 2)
	for id := range uint32(4) { // before, at, beyond what was given out
		lost.Id = id
		err, given := h.s.CheckKeep(lost), id == 1 || id == 2
		if (err == nil) != (id == 0) || errors.Is(err, ErrNotFound) != given {
			t.Errorf("volume %d: %v", id, err)
		}
	}
	for range 2 {
		h.recover("d1")
	}
	lost.Id = 3
	h.refuse(keep(lost), ErrRefused, "never gave the id 3", "Keep the folder")
	h.do(keep(volume("t1", 2)))
	lost.Id = 0
	fresh := h.do(keep(lost)).VolumeID
	h.recover("d1")
	m := h.s.Map(nil)
	if len(m.UnknownVolumes) != 2 || m.UnknownVolumes[0].First != 3 || m.UnknownVolumes[0].Last != fresh-1 ||
		m.UnknownVolumes[1].First != fresh+1 || m.UnknownVolumes[1].Last != m.LastVolume || fresh < 1<<16 {
		t.Errorf("volume %d, %v", fresh, m.UnknownVolumes)
	}
	h.do(giveUp(fresh))
	lost.Id = fresh
	h.refuse(keep(lost), ErrNotFound, "was given up")
	h.checkCopies()
}

// A tier node's name is an identity's, as a memory node's is.
func TestVolumeOwner(t *testing.T) {
	h := newHarness(t)
	mine, theirs := volume("t1", 1), volume("t1", 2)
	mine.Identity, theirs.Identity = "tier/a", "tier/b"
	h.do(keep(mine))
	h.refuse(keep(theirs), ErrForeign, "belongs to tier/a, not to tier/b")
	h.do(keep(volume("t1", 2))) // without TLS
	if got := h.s.Volume(1).Identity; got != "tier/a" {
		t.Fatalf("identity %q", got)
	}
}

// Nothing that a tier node says of itself is believed beyond the bounds.
func TestHostileVolumes(t *testing.T) {
	h := newHarness(t)
	for name, spoil := range map[string]func(*dirpb.Volume){
		"name":      func(v *dirpb.Volume) { v.Name = "T 1" },
		"folder":    func(v *dirpb.Volume) { v.Folder = 0 },
		"boot":      func(v *dirpb.Volume) { v.Boot = 0 },
		"process":   func(v *dirpb.Volume) { v.Process = 0 },
		"capacity":  func(v *dirpb.Volume) { v.CapacityBytes = MaxCapacityBytes + 1 },
		"host":      func(v *dirpb.Volume) { v.HostId = "a\x1b[2J" },
		"domain":    func(v *dirpb.Volume) { v.Domain = string(make([]byte, MaxLabelLen+1)) },
		"endpoints": func(v *dirpb.Volume) { v.Endpoints = nil },
		"address":   func(v *dirpb.Volume) { v.Endpoints[0].Addr = string(make([]byte, MaxLabelLen+1)) },
		"regions":   func(v *dirpb.Volume) { v.Regions = volume("t1", 1, 2, 1).Regions },
		"region":    func(v *dirpb.Volume) { v.Regions = volume("t1", 1, 0).Regions },
	} {
		v := volume("t1", 1)
		if spoil(v); h.try(keep(v)).Err == nil {
			t.Errorf("%s: taken: %v", name, v)
		}
	}
	h.refuse(keep(nil), ErrInvalid)
	for i := range MaxVolumes {
		v := volume("t1", 1)
		v.Name, v.Folder = "t"+string(rune('a'+i%26))+string(rune('a'+i/26%26))+string(rune('a'+i/26/26)), uint64(i+1)
		if r := Apply(h.s, keep(v)); r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	v := volume("t1", 1)
	v.Folder = 1 << 40
	h.refuse(keep(v), ErrFull, "give up those that are gone")
}

// The regions of a namespace are its sessions' alone, and nobody else's are in the map.
func TestVolumesOfSessions(t *testing.T) {
	h := tiered(t)
	x := h.do(openKnowing(1)).Session
	m := h.s.Map(x)
	if len(m.Volumes) != 2 || m.LastVolume != 2 {
		t.Fatalf("%v", m.Volumes)
	}
	for _, v := range m.Volumes {
		if len(v.Regions) != 1 || v.Regions[0].NamespaceId != 1 || v.Regions[0].Rkey != 8 || v.Folder != 0 ||
			v.Process != 0 || len(v.Endpoints) != 1 {
			t.Errorf("%v", v)
		}
	}
	if m := h.s.Map(h.s.Session(1)); len(m.Volumes) != 1 || m.Volumes[0].Regions[0].Rkey != 9 {
		t.Errorf("%v", m.Volumes)
	}
	if m := h.s.Map(nil); len(m.Volumes) != 2 || m.Volumes[0].Regions[0].Rkey != 0 || m.Volumes[0].Folder == 0 {
		t.Errorf("%v", m.Volumes)
	}
	// A process that has not opened the files yet is away, and not given up; another namespace's tier node is neither.
	h.do(keep(volume("t1", 2)))
	m = h.s.Map(x)
	if len(m.Volumes) != 2 || m.Volumes[0].Id != 1 || m.Volumes[0].Boot != 2 || len(m.Volumes[0].Regions) != 0 {
		t.Errorf("after a restart: %v", m.Volumes)
	}
	if m := h.s.Map(h.s.Session(1)); len(m.Volumes) != 1 || len(m.Volumes[0].Regions) != 0 {
		t.Errorf("after a restart: %v", m.Volumes)
	}
	// A region of a namespace whose tier does not name the volume is none.
	h.do(keep(volume("t2", 1, 1, 2, 3)))
	if v := h.s.Volume(2); len(v.Regions) != 1 {
		t.Errorf("%v", v)
	}
	h.checkCopies()
}

// A volume is told of each namespace that names it, and with whom it shares the index.
func TestTierWork(t *testing.T) {
	h := tiered(t)
	one, two := h.s.TierWork(1), h.s.TierWork(2)
	if len(one) != 2 || len(two) != 1 || one[0].Namespace != "cold" || one[1].Namespace != "warm" {
		t.Fatalf("%v\n%v", one, two)
	}
	if w := two[0]; w.LimitBytes != 1<<29 || !slices.Equal(w.Volumes, []uint32{1, 2}) || w.Tier.Copies != 1 ||
		w.Tier.MinBytes != 1<<10 || !slices.Equal(w.Tier.Nodes, []string{"t1", "t2"}) {
		t.Errorf("%v", w)
	}
	if h.do(silence(1, 1)); !slices.Equal(h.s.TierWork(2)[0].Volumes, []uint32{2}) {
		t.Error("a silent volume has a share")
	}
	h.do(deleteNamespace("cold"))
	if h.s.NamespaceNamed("cold") != nil || len(h.s.TierWork(2)) != 0 || len(h.s.Volume(2).Regions) != 0 ||
		len(h.s.Volume(1).Regions) != 1 {
		t.Errorf("%v", h.s.Volumes())
	}
	h.checkCopies()
}

// A store notes what it lost with a volume, whatever its last process had opened, and if there are other copies. A
// cache loses what it may lose.
func TestGiveUpVolume(t *testing.T) {
	h := tiered(t)
	r := h.do(giveUp(1))
	w := h.s.NamespaceNamed("cold")
	if len(r.Lost) != 1 || r.Lost[0].Volume != 1 || w.Lost != 1 || len(w.Losses) != 1 || w.Losses[0].VolumeId != 1 ||
		w.Losses[0].Node != "t1" || h.s.NamespaceNamed("warm").Lost != 0 {
		t.Fatalf("%+v\n%v", r.Lost, w)
	}
	if r := h.do(giveUp(2)); len(r.Lost) != 1 || len(h.s.NamespaceNamed("cold").Losses) != 2 {
		t.Fatalf("%+v", r.Lost)
	}
	h.do(&fsmpb.Command{Op: &fsmpb.Command_AcceptLoss{AcceptLoss: &dirpb.AcceptLossRequest{Name: "cold", Lost: 2}}})
	h.checkCopies()

	h = tiered(t)
	h.do(set(tierSet("cold", &dirpb.Tier{Nodes: []string{"t1", "t2"}, Copies: 2})))
	h.do(keep(volume("t1", 2)))
	if r := h.do(giveUp(1)); len(r.Lost) != 1 {
		t.Fatalf("%+v", r.Lost)
	}
	if r := h.do(giveUp(2)); len(r.Lost) != 1 {
		t.Fatalf("%+v", r.Lost)
	}
}

// A namespace's tier has bounds, and stays.
func TestTierOptions(t *testing.T) {
	h := tiered(t)
	nodes := func(names ...string) *dirpb.Tier { return &dirpb.Tier{Nodes: names} }
	with := func(t *dirpb.Tier, change func(*dirpb.Tier)) *dirpb.Tier { change(t); return t }
	for _, c := range []struct {
		namespace string
		tier      *dirpb.Tier
		want      error
		words     string
	}{
		{"cold", nodes(), ErrInvalid, "a namespace that has a tier keeps one"},
		{"cold", nodes("t1", "t1"), ErrInvalid, "named twice"},
		{"cold", nodes("t1", "t2", "t9"), ErrNotFound, "t9"},
		{"cold", nodes("t1"), ErrRefused, "kvctl tier give-up t2"},
		{"cold", with(nodes("t1", "t2"), func(t *dirpb.Tier) { t.Copies = 3 }), ErrInvalid, "2 tier nodes"},
		{"cold", with(nodes("t1", "t2"), func(t *dirpb.Tier) { t.Bytes = MinTierBytes }), ErrInvalid, "want"},
		{"cold", with(nodes("t1", "t2"), func(t *dirpb.Tier) { t.MinBytes = 1 << 40 }), ErrInvalid, "want at most"},
		{"warm", with(nodes("t1", "t2"), func(t *dirpb.Tier) { t.Copies = 2 }), ErrInvalid, "the cache"},
	} {
		h.refuse(set(tierSet(c.namespace, c.tier)), c.want, c.words)
	}
	before := proto.CloneOf(h.s.NamespaceNamed("cold"))
	if r := h.do(set(tierSet("cold", nil))); len(r.Changes) > 0 || !proto.Equal(before, r.Namespace) {
		t.Errorf("a change without a tier changed it: %v", r.Namespace)
	}
	h.do(set(tierSet("warm", nodes("t1", "t2"))))
	// A tier node that is given up may leave, or come back with another folder.
	h.do(giveUp(2))
	h.do(set(tierSet("warm", nodes("t1"))))
	h.do(set(tierSet("cold", with(nodes("t1", "t2"), func(t *dirpb.Tier) { t.WriteRate = 1 << 20 }))))
	if id := h.do(keep(volume("t2", 1, 1))).VolumeID; id != 3 || len(h.s.TierWork(3)) != 1 {
		t.Errorf("volume %d", id)
	}
	h.checkCopies()
}

// A namespace gets a tier only when all its sessions know stubs, and others open none in it from then on.
func TestTierAndSessions(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 1 << 26})
	h.do(keep(volume("t1", 1)))
	h.do(openKnowing(1))
	h.do(openAs(&fsmpb.OpenSession{NamespaceId: 1, Client: "old one"}))
	h.refuse(set(tierSet("a", &dirpb.Tier{Nodes: []string{"t1"}})), ErrRefused, "1 sessions", `2 "old one"`)
	h.do(closeS(2, 0))
	h.do(set(tierSet("a", &dirpb.Tier{Nodes: []string{"t1"}})))
	h.refuse(openIn(1, 1), ErrRefused, "run a later version")
	h.refuse(openAs(&fsmpb.OpenSession{NamespaceId: 1, Background: true, Everywhere: true}), ErrRefused)
	h.do(openKnowing(1))
	h.checkCopies()
}

// Below level 4 there are no tier nodes, and rows are what they were.
func TestTierLevel(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(levelPins))
	h.do(register("m1", 100))
	h.refuse(keep(volume("t1", 1)), ErrRefused, "tier nodes begin with level 4, and the directory is at level 3")
	// A command that an earlier version proposed does what it does there; one of this version is not proposed.
	with := &dirpb.CreateNamespaceRequest{Name: "a", Tier: &dirpb.Tier{Nodes: []string{"t1"}}}
	if w := h.do(create(with)).Namespace; w.Tier != nil {
		t.Errorf("%v", w)
	}
	if w := h.do(set(tierSet("a", with.Tier))).Namespace; w.Tier != nil {
		t.Errorf("%v", w)
	}
	pins := &dirpb.CreateNamespaceRequest{Name: "a", MaxPinnedPercent: 1}
	for level, q := range map[string]*dirpb.CreateNamespaceRequest{"level 4": with, "": pins} {
		if err := h.s.CheckLevel(q); level == "" && err != nil || level != "" && (!errors.Is(err, ErrRefused) ||
			!strings.Contains(err.Error(), level)) {
			t.Errorf("%v: %v", q, err)
		}
	}
	if x := h.do(openKnowing(1)).Session; x.KnowsStubs {
		t.Error("a session's row says more than its level knows")
	}
	h.do(raise(levelTiers))
	if err := h.s.CheckLevel(with); err != nil {
		t.Error(err)
	}
	h.do(keep(volume("t1", 1)))
	h.refuse(set(tierSet("a", &dirpb.Tier{Nodes: []string{"t1"}})), ErrRefused, "1 sessions")
	if x := h.do(openKnowing(1)).Session; !x.KnowsStubs {
		t.Error("a session does not know stubs")
	}
	h.checkCopies()
}
