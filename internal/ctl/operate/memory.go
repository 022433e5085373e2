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

// memoryHeader heads the columns that memoryRow gives.
var memoryHeader = ctl.Row{"Heap", "Live", "Live %", "At sessions", "Limbo", "Coming", "Waiting", "Recalled", "Lost",
	"Room", "Short"}

func memoryRow(m *overview.Memory) ctl.Row {
	known := func(s string) string {
		if !m.Known {
			return "-"
		}
		return s
	}
	return ctl.Row{ctl.BytesText(m.Heap), known(ctl.BytesText(m.Live)), known(ctl.Percent(m.Live, m.Heap)),
		known(ctl.BytesText(m.Free + m.Foreign)),
		known(ctl.BytesText(m.Limbo)), known(ctl.BytesText(m.Coming)), ctl.BytesText(m.Waiting),
		ctl.BytesText(m.Recalled),
		known(ctl.BytesText(m.Lost)),
		ctl.BytesText(m.Room), known(ctl.YesNo(m.Short))}
}

// fullness tells in short how a placement group stands; nil: nothing is known of it.
func fullness(m *overview.Memory) ctl.Row {
	if m == nil || !m.Known {
		return ctl.Row{"-", "-", "-"}
	}
	return ctl.Row{ctl.Percent(m.Live, m.Heap), ctl.BytesText(m.Lost), ctl.YesNo(m.Short)}
}

// printMemory prints a line for each placement group, and one for the whole of a namespace
// that has several.
func (a *commands) printMemory(st *dirpb.StatusReply) {
	all := overview.Memories(st)
	sums := overview.Sums(all)
	var rows []ctl.Row
	of := 0 // placement groups of the namespace
	for i, m := range all {
		of++
		rows = append(rows, append(ctl.Row{m.Namespace, m.PG}, memoryRow(m)...))
		if i+1 < len(all) && all[i+1].Namespace == m.Namespace {
			continue
		}
		if of > 1 {
			rows = append(rows, append(ctl.Row{m.Namespace, "all"}, memoryRow(sums[0])...))
		}
		sums, of = sums[1:], 0
	}
	a.PrintTable(append(ctl.Row{"Namespace", "PG"}, memoryHeader...), rows)
}

// memoryJSON is a overview.Memory; null stands for what the directory node that answered
// does not know.
type memoryJSON struct {
	Namespace string   `json:"namespace"`
	PG        uint32   `json:"pg,omitempty"`
	Heap      uint64   `json:"heap_bytes"`
	Granted   uint64   `json:"granted_bytes"`
	Live      *uint64  `json:"live_bytes"`
	Fullness  *float64 `json:"live_percent"`
	Free      *uint64  `json:"free_bytes"`
	Foreign   *uint64  `json:"foreign_bytes"`
	Limbo     *uint64  `json:"limbo_bytes"`
	Coming    *uint64  `json:"coming_bytes"`
	Waiting   uint64   `json:"waiting_bytes"`
	Recalled  uint64   `json:"recalled_bytes"`
	Lost      *uint64  `json:"lost_bytes"`
	Room      uint64   `json:"room_bytes"`
	Short     *bool    `json:"short"`
}

func jsonOf(m *overview.Memory) memoryJSON {
	j := memoryJSON{Namespace: m.Namespace, PG: m.PG, Heap: m.Heap, Granted: m.Granted, Waiting: m.Waiting,
		Recalled: m.Recalled, Room: m.Room}
	if m.Known {
		j.Live, j.Free, j.Foreign, j.Limbo, j.Coming, j.Lost, j.Short = &m.Live, &m.Free, &m.Foreign, &m.Limbo,
			&m.Coming, &m.Lost, &m.Short
		if m.Heap > 0 {
			full := float64(m.Live) / float64(m.Heap) * 100
			j.Fullness = &full
		}
	}
	return j
}

// printStateJSON prints rest, all or a part of the state st, with the memory of its
// namespaces and placement groups in bytes.
func (a *commands) printStateJSON(st, rest *dirpb.StatusReply) error {
	line, err := ctl.ProtoJSON(rest)
	if err != nil {
		return err
	}
	all := overview.Memories(st)
	memory, err := json.Marshal(map[string][]memoryJSON{"namespaces": ctl.MapTo(overview.Sums(all), jsonOf),
		"placement_groups": ctl.MapTo(all, jsonOf)})
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
