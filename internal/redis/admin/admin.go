// Package admin is for those who look after a gateway, and has commands of Redis for them: SLOWLOG and LATENCY. It
// knows no connection and no store: whoever performs commands says how long they took.
//
// Start with [Slow], whose methods may be called concurrently. It owns copies of what it is told, bounded in number and
// bytes. The bounds and the texts are those of Redis.
package admin

import "github.com/kvd-project/kvd/internal/redis/args"

// refusal is the reply to a command that is wrong, in Redis's words.
type refusal = args.Refusal
