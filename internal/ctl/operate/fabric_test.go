package operate

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// A memory node's adapters are among what nodes -o json shows of it.
func TestNodesShowFabrics(t *testing.T) {
	var out bytes.Buffer
	a := &commands{ctl.New(nil, &out, nil)}
	a.Output = "json"
	err := a.printNodes(&dirpb.StatusReply{
		Map: &dirpb.Map{Nodes: []*dirpb.Node{{Id: 1, Name: "m1"}, {Id: 2, Name: "m2"}}},
		NodeStats: map[uint32]*dirpb.NodeStats{1: {Fabrics: []*dirpb.Fabric{
			{Device: "mlx5_0", TrafficClass: 104, PkeyIndex: 2, GidType: "RoCE v2"}}}}})
	if err != nil {
		t.Fatal(err)
	}
	type shown struct {
		Name    string
		Fabrics []struct {
			Device       string
			TrafficClass int    `json:"traffic_class"`
			PKeyIndex    int    `json:"pkey_index"`
			GIDType      string `json:"gid_type"`
		}
	}
	var m1, m2 shown
	d := json.NewDecoder(&out)
	if err := d.Decode(&m1); err != nil {
		t.Fatal(err)
	}
	if err := d.Decode(&m2); err != nil {
		t.Fatal(err)
	}
	if m1.Name != "m1" || len(m1.Fabrics) != 1 || m2.Fabrics == nil || len(m2.Fabrics) != 0 {
		t.Fatalf("shown are %+v and %+v", m1, m2)
	}
	if f := m1.Fabrics[0]; f.Device != "mlx5_0" || f.TrafficClass != 104 || f.PKeyIndex != 2 || f.GIDType != "RoCE v2" {
		t.Errorf("shown are %+v and %+v", m1, m2)
	}
}
