package simtest

import "maps"

// restartWide are random scopes in which processes of memory nodes end and others take over their memory, mostly beside whatever else
// goes wrong.
var restartWide = map[string]Config{
	"restart": {Restarts: 2, Crashes: 1, Pauses: 1, Failures: 1, Deadlines: 1, WritePieces: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Add, 0), k(Get, 0)},
		{k(Put, 0), k(Get, 0), k(CAS, 0), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 1), k(Get, 0), k(Incr, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"restart-keys": {Restarts: 2, NewKeys: true, Crashes: 1, Pauses: 1, Leaders: 1, Failures: 1, Epochs: 8, Units: 4, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Add, 0), k(Get, 0)},
		{k(Put, 0), k(Get, 0), k(CAS, 0), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 1), k(Get, 0), k(Incr, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"restart-r2": {Replicas: 2, Nodes: 3, Janitors: 1, Restarts: 3, NodeCrashes: 1, NodePauses: 1, Pauses: 1, Failures: 1, Leaders: 1, WritePieces: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)},
		{k(Add, 0), k(Get, 0), k(Put, 1), k(Incr, 0)}},
		Setup: one, Warm: true},
	"restart-r2-keys": {Replicas: 2, Nodes: 3, Janitors: 1, Missing: 1, Restarts: 3, NewKeys: true, NodeCrashes: 1, Crashes: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"restart-r3": {Replicas: 3, Nodes: 4, Janitors: 2, Restarts: 4, NodeCrashes: 1, Pauses: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"restart-move": {Replicas: 2, PGs: 2, Janitors: 2, Children: 2, Restarts: 2, Crashes: 1, Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
		{k(Put, 10), k(Get, 10), k(Del, 10), k(Put, 12)},
		{k(Get, 10), k(Put, 11), k(Put, 10), k(Get, 12)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"restart-recall": {Replicas: 2, Janitors: 1, TwoExtents: true, Acts: []Act{{Recall, 1, 0}}, Restarts: 2, Crashes: 1, Pauses: 1, Epochs: 6, Units: 4, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 2)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
}

func init() {
	maps.Copy(wide, restartWide)
	maps.Copy(heavy, map[string]int{"restart-r2": 2, "restart-r2-keys": 4, "restart-r3": 8, "restart-move": 4, "restart-recall": 4})
	maps.Copy(scopes, map[string]Config{
		"restart-update":    {Restarts: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
		"restart-insert":    {Restarts: 1, Scripts: [][]Step{one, {k(Add, 0)}}},
		"restart-pause":     {Restarts: 1, Pauses: 1, Scripts: [][]Step{one, {k(Get, 0)}}, Setup: one, Warm: true},
		"restart-keys":      {Restarts: 1, NewKeys: true, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
		"restart-r2-update": {Replicas: 2, Restarts: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
		"restart-r2-join":   {Replicas: 2, Missing: 1, Janitors: 1, Restarts: 1, Scripts: [][]Step{{k(Put, 0)}}, Setup: one, Warm: true},
	})
}
