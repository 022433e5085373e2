// Package fsmpb is the generated encoding of the directory's commands, state
// rows and snapshots; read fsm.proto. It holds no logic. Only server and
// server/fsm import it.
package fsmpb
