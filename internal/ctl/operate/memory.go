package operate

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

// memoryHelp says what the columns of memory mean.
const memoryHelp = "Memory is that of one copy, in these states:\n\n" +
	"  Heap         memory for records\n" +
	"  Live         memory of records; Live % is its part of the heap\n" +
	"  At sessions  free memory that sessions hold, to write with or to hand back\n" +
	"  Limbo        memory of records that were replaced or deleted, and that somebody may\n" +
	"               still read: about 0.3 s\n" +
	"  Coming       free memory on its way to the session that it was granted to\n" +
	"  Waiting      memory that came back and may be granted once 1,024 reclaim epochs have\n" +
	"               passed: about 100 s, and 1 s while somebody waits for it\n" +
	"  Recalled     memory in extents that are being recalled; it counts in another column, too\n" +
	"  Lost         memory that nobody holds, such as a killed client's; a recall finds it,\n" +
	"               `kvctl check` at once\n" +
	"  Room         memory that may be granted now\n" +
	"  Short        yes: a session found too little lately\n\n" +
	"The leader of the directory alone knows Live, At sessions, Limbo, Coming, Lost and Short,\n" +
	"within about a second; if another directory node answered, they are shown as -."

// printMemory prints a line for each placement group, and one for the whole of a namespace
// that has several.
func (a *commands) printMemory(st *dirpb.StatusReply) {
	all := overview.Memories(st)
	sums := overview.Sums(all)
	var rows []*overview.Memory
	of := 0 // placement groups of the namespace
	for i, m := range all {
		of++
		rows = append(rows, m)
		if i+1 < len(all) && all[i+1].Namespace == m.Namespace {
			continue
		}
		if of > 1 {
			rows = append(rows, sums[0])
		}
		sums, of = sums[1:], 0
	}
	ctl.PrintColumns(a.App, overview.MemoryColumns, rows)
}

// printStateJSON prints rest, all or a part of the state st, with the memory of its
// namespaces and placement groups in bytes.
func (a *commands) printStateJSON(st, rest *dirpb.StatusReply) error {
	line, err := ctl.ProtoJSON(rest)
	if err != nil {
		return err
	}
	all := overview.Memories(st)
	namespaces, err := overview.MemoryColumns.Objects(overview.Sums(all))
	if err != nil {
		return err
	}
	groups, err := overview.MemoryColumns.Objects(all)
	if err != nil {
		return err
	}
	memory, err := json.Marshal(map[string][]json.RawMessage{"namespaces": namespaces, "placement_groups": groups})
	if err != nil {
		return err
	}
	for _, u := range st.GetUsage() {
		if !u.GetEstimated() { // one directory node knows all of it or nothing
			line = unknown(line)
			break
		}
	}
	problems := overview.Problems(st)
	if problems == nil {
		problems = []overview.Problem{}
	}
	wrong, err := json.Marshal(problems)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.Stdout, "%s,\"memory\":%s,\"problems\":%s}\n", bytes.TrimSuffix(line, []byte("}")), memory,
		wrong)
	return err
}

// unknown replaces by null what a directory node that does not lead says of PGUsage without
// knowing it. No text in a state looks like these members, since quotes in texts are escaped.
func unknown(line []byte) []byte {
	for _, state := range []string{"live", "free", "foreign", "limbo", "coming", "lost"} {
		line = bytes.ReplaceAll(line, []byte(`"`+state+`_units":"0"`), []byte(`"`+state+`_units":null`))
	}
	return bytes.ReplaceAll(line, []byte(`"short":false`), []byte(`"short":null`))
}
