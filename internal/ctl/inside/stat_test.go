package inside

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// A directory node that does not lead does not know what is lost, so it counts as held; zero
// would say that nothing is.
func TestStatOfAFollower(t *testing.T) {
	ns := &dirpb.Namespace{Id: 1, Name: "default", LimitBytes: 50 * layout.UnitSize}
	u := &dirpb.PGUsage{PgId: 1, HeapUnits: 100, GrantedUnits: 40, LostUnits: 3, LiveUnits: 20, Short: true,
		Estimated: true}
	st := &dirpb.StatusReply{
		Map:   &dirpb.Map{Namespaces: []*dirpb.Namespace{ns}, Pgs: []*dirpb.PlacementGroup{{Id: 1, NamespaceId: 1}}},
		Usage: []*dirpb.PGUsage{u}}
	l := StatLine{Live: 20 * layout.UnitSize}
	l.usage(st, ns)
	if l.Held != 17*layout.UnitSize || l.Lost == nil || *l.Lost != 3*layout.UnitSize || l.Short == nil || !*l.Short ||
		l.Free != 10*layout.UnitSize {
		t.Errorf("a leader: %+v", l)
	}
	st.Usage[0] = &dirpb.PGUsage{PgId: 1, HeapUnits: 100, GrantedUnits: 40}
	l.usage(st, ns)
	if l.Held != 20*layout.UnitSize || l.Lost != nil || l.Short != nil || l.Free != 10*layout.UnitSize {
		t.Errorf("a follower: %+v", l)
	}
	if b, err := json.Marshal(l); err != nil || !strings.Contains(string(b), `"lost_bytes":null`) ||
		!strings.Contains(string(b), `"short":null`) {
		t.Errorf("%s, %v", b, err)
	}
}
