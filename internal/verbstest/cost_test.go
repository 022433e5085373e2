package verbstest

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/cost"
)

// Every operation takes as many round trips and verbs as docs/protocol.md says.
func TestCost(t *testing.T) {
	needs(t, "1")
	s := newStore(t, 5*time.Second, node{"m1", 0, nil}, node{"m2", 1, nil})
	want := map[string][2]cost.Cost{ // for 1 and 2 replicas, from the document
		"GET cached":              {{RTT: 1, Verbs: 2}, {RTT: 1, Verbs: 2}},
		"GET, mirrored":           {{RTT: 1, Verbs: 2}, {RTT: 1, Verbs: 2}},
		"GET":                     {{RTT: 2, Verbs: 2}, {RTT: 2, Verbs: 2}},
		"UPDATE cached":           {{RTT: 1, Verbs: 2}, {RTT: 2, Verbs: 4}},
		"UPDATE, mirrored":        {{RTT: 2, Verbs: 4}, {RTT: 3, Verbs: 6}},
		"UPDATE, no hint":         {{RTT: 3, Verbs: 6}, {RTT: 4, Verbs: 9}},
		"INSERT":                  {{RTT: 2, Verbs: 5}, {RTT: 3, Verbs: 8}},
		"DELETE cached":           {{RTT: 1, Verbs: 1}, {RTT: 2, Verbs: 2}},
		"MULTI-GET of 16, cached": {{RTT: 1, Verbs: 32}, {RTT: 1, Verbs: 32}},
		"MULTI-GET of 16":         {{RTT: 2, Verbs: 32}, {RTT: 2, Verbs: 32}},
		"MULTI-CAS of 2, cached":  {{RTT: 2, Verbs: 7, Behind: 2}, {RTT: 4, Verbs: 14, Behind: 4}},
		"MULTI-CAS of 4, cached":  {{RTT: 2, Verbs: 13, Behind: 4}, {RTT: 4, Verbs: 26, Behind: 8}},
	}
	for r := 1; r <= 2; r++ {
		name := fmt.Sprintf("copies%d", r)
		s.must("namespace", "create", name, "--replicas", itoa(r), "--bytes", "40MiB")
		out := s.must("--namespace", name, "cost", "--trials", "4", "--batch", "16", "-o", "json")
		var rep struct {
			Replicas   int        `json:"replicas"`
			OK         bool       `json:"ok"`
			Operations []cost.Row `json:"operations"`
		}
		if err := json.Unmarshal([]byte(out), &rep); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if rep.Replicas != r || !rep.OK || len(rep.Operations) != len(want) {
			t.Errorf("kvctl cost: %d replicas, ok is %v, %d rows; want %d, true, %d", rep.Replicas, rep.OK,
				len(rep.Operations), r, len(want))
		}
		var rows [][]string
		for _, o := range rep.Operations {
			w, ok := want[o.Operation]
			if got := (cost.Cost{RTT: o.RTT, Verbs: o.Verbs, Behind: o.Behind}); !ok || got != w[r-1] || !o.OK {
				t.Errorf("%s with %d replicas: %+v, want %+v", o.Operation, r, got, w[r-1])
			}
			rows = append(rows, []string{o.Operation, fmt.Sprintf("%d / %d + %d", o.RTT, o.Verbs, o.Behind),
				fmt.Sprintf("%d / %d + %d", o.WantRTT, o.WantVerbs, o.WantBehind),
				itoa(o.Doorbells), itoa(o.ReadBytes), itoa(o.WriteBytes), fmt.Sprintf("%d of %d", o.Agree, o.Trials)})
		}
		printTable(fmt.Sprintf("Costs over %s, r = %d: round trips / verbs", provider, r),
			[]string{"operation", "measured", "expected", "doorbells", "bytes read", "bytes written",
				"trials that agree"}, rows)
	}
}
