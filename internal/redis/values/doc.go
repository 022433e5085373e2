// Package values is what commands do to keys: strings, hashes, lists, sets, sorted sets, streams, bits, positions and
// HyperLogLogs. The bytes of values are internal/redis/collection's, and arguments are read by internal/redis/args.
//
// A command sees its keys, its arguments and its reply, and nothing else: no connection, no store, and no clock but
// Key.Now. It may run several times, until what it has done is written. Batches, transactions, scripts, memory and
// events are left to whoever performs it. Start with [OneKey], [SeveralKeys] and [WaitingFor], which are the commands
// by their names.
//
// The maps do not change, and any goroutine may call their functions. A [Key] and [Keys] are for one goroutine. A value
// that a command puts into a Key may lie in its arguments or in the Key's own buffer. Nobody writes to these until all
// of it is over. Replies, and the order in which arguments and keys are looked at, are those of Redis 7.
package values
