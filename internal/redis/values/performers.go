package values

import (
	"time"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

// Functions perform commands on keys, and are found by the command's name in lower case. All else about a command is in
// its row, which names no function.

// A KeyFunc is a command on one key: it appends its one reply and changes the key. An error is its reply instead.
// It depends on nothing else, and may run several times.
type KeyFunc func(k *Key, args [][]byte, w *resp.Writer) error

// A SeveralFunc is a command on several keys: it appends its one reply to w and changes keys of t. An error is its
// reply instead.
type SeveralFunc func(t Keys, args [][]byte, w *resp.Writer) error

// A WaitFunc reads the arguments of a command that may wait. It may keep them.
type WaitFunc func(args [][]byte) (Blocking, error)

// OneKey are the commands on one key. It does not change.
var OneKey = map[string]KeyFunc{
	"append":       cmdAppend,
	"bitcount":     cmdBitCount,
	"bitfield":     cmdBitField,
	"bitfield_ro":  cmdBitFieldRO,
	"bitpos":       cmdBitPos,
	"decr":         cmdDecr,
	"decrby":       cmdDecrBy,
	"del":          cmdDel,
	"dump":         cmdDump,
	"exists":       cmdExists,
	"expire":       cmdExpire,
	"expireat":     cmdExpireAt,
	"expiretime":   cmdExpireTime,
	"geoadd":       cmdGeoAdd,
	"geodist":      cmdGeoDist,
	"geohash":      cmdGeoHash,
	"geopos":       cmdGeoPos,
	"get":          cmdGet,
	"getbit":       cmdGetBit,
	"getdel":       cmdGetDel,
	"getex":        cmdGetEX,
	"getrange":     cmdGetRange,
	"getset":       cmdGetSet,
	"hdel":         cmdHDel,
	"hexists":      cmdHExists,
	"hget":         cmdHGet,
	"hgetall":      cmdHGetAll,
	"hincrby":      cmdHIncrBy,
	"hincrbyfloat": cmdHIncrByFloat,
	"hkeys":        cmdHKeys,
	"hlen":         cmdHLen,
	"hmget":        cmdHMGet,
	"hmset":        cmdHMSet,
	"hrandfield":   cmdHRandField,
	"hscan":        cmdHScan,
	"hset":         cmdHSet,
	"hsetnx":       cmdHSetNX,
	"hstrlen":      cmdHStrlen,
	"hvals":        cmdHVals,
	"incr":         cmdIncr,
	"incrby":       cmdIncrBy,
	"incrbyfloat":  CmdIncrByFloat,
	"lindex":       cmdLIndex,
	"linsert":      cmdLInsert,
	"llen":         cmdLLen,
	"lpop": func(k *Key, args [][]byte, w *resp.Writer) error {
		return pop(k, args, w, "lpop", true)
	},
	"lpos": cmdLPos,
	"lpush": func(k *Key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, true, false)
	},
	"lpushx": func(k *Key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, true, true)
	},
	"lrange":          CmdLRange,
	"lrem":            cmdLRem,
	"lset":            cmdLSet,
	"ltrim":           cmdLTrim,
	"memory|usage":    cmdMemoryUsage,
	"mget":            cmdMGet,
	"mset":            cmdMSet,
	"object|encoding": cmdEncoding,
	"object|freq":     cmdFreq,
	"object|refcount": cmdRefcount,
	"persist":         cmdPersist,
	"pexpire":         cmdPExpire,
	"pexpireat":       cmdPExpireAt,
	"pexpiretime":     cmdPExpireTime,
	"pfadd":           cmdPFAdd,
	"pfdebug":         cmdPFDebug,
	"psetex":          cmdPSetEX,
	"pttl":            cmdPTTL,
	"restore":         cmdRestore,
	"restore-asking":  cmdRestore,
	"rpop": func(k *Key, args [][]byte, w *resp.Writer) error {
		return pop(k, args, w, "rpop", false)
	},
	"rpush": func(k *Key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, false, false)
	},
	"rpushx": func(k *Key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, false, true)
	},
	"sadd":                  cmdSAdd,
	"scard":                 cmdSCard,
	"set":                   cmdSet,
	"setbit":                cmdSetBit,
	"setex":                 cmdSetEX,
	"setnx":                 cmdSetNX,
	"setrange":              cmdSetRange,
	"sismember":             cmdSIsMember,
	"smembers":              cmdSMembers,
	"smismember":            cmdSMIsMember,
	"spop":                  cmdSPop,
	"srandmember":           cmdSRandMember,
	"srem":                  cmdSRem,
	"sscan":                 cmdSScan,
	"strlen":                cmdStrlen,
	"substr":                cmdGetRange,
	"touch":                 cmdExists,
	"ttl":                   cmdTTL,
	"type":                  cmdType,
	"unlink":                cmdDel,
	"xack":                  cmdXAck,
	"xadd":                  cmdXAdd,
	"xautoclaim":            cmdXAutoClaim,
	"xclaim":                cmdXClaim,
	"xdel":                  cmdXDel,
	"xgroup|create":         cmdXGroupCreate,
	"xgroup|createconsumer": cmdXGroupCreateConsumer,
	"xgroup|delconsumer":    cmdXGroupDelConsumer,
	"xgroup|destroy":        cmdXGroupDestroy,
	"xgroup|setid":          cmdXGroupSetID,
	"xinfo|consumers":       cmdXInfoConsumers,
	"xinfo|groups":          cmdXInfoGroups,
	"xinfo|stream":          cmdXInfoStream,
	"xlen":                  cmdXLen,
	"xpending":              cmdXPending,
	"xrange": func(k *Key, args [][]byte, w *resp.Writer) error {
		return xrange(k, args, w, false)
	},
	"xrevrange": func(k *Key, args [][]byte, w *resp.Writer) error {
		return xrange(k, args, w, true)
	},
	"xsetid": cmdXSetID,
	"xtrim":  cmdXTrim,
	"zadd":   cmdZAdd,
	"zcard":  cmdZCard,
	"zcount": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zcount(k, args, w, byScore)
	},
	"zincrby": cmdZIncrBy,
	"zlexcount": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zcount(k, args, w, byLex)
	},
	"zmscore": cmdZMScore,
	"zpopmax": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zpop(k, args, w, true)
	},
	"zpopmin": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zpop(k, args, w, false)
	},
	"zrandmember": cmdZRandMember,
	"zrange": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{auto: true})
	},
	"zrangebylex": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byLex})
	},
	"zrangebyscore": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byScore})
	},
	"zrank": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrank(k, args, w, false)
	},
	"zrem": cmdZRem,
	"zremrangebylex": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byLex)
	},
	"zremrangebyrank": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byRank)
	},
	"zremrangebyscore": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byScore)
	},
	"zrevrange": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{rev: true})
	},
	"zrevrangebylex": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byLex, rev: true})
	},
	"zrevrangebyscore": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byScore, rev: true})
	},
	"zrevrank": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrank(k, args, w, true)
	},
	"zscan":  cmdZScan,
	"zscore": cmdZScore,
}

// SeveralKeys are those on several keys at once, but for scripts, libraries and those that may wait.
var SeveralKeys = map[string]SeveralFunc{
	"bitop":                cmdBitOp,
	"copy":                 cmdCopy,
	"georadius":            georadius(geoquery{at: 6}),
	"georadius_ro":         georadius(geoquery{at: 6, readOnly: true}),
	"georadiusbymember":    georadius(geoquery{at: 5, member: true}),
	"georadiusbymember_ro": georadius(geoquery{at: 5, member: true, readOnly: true}),
	"geosearch":            georadius(geoquery{at: 2, search: true}),
	"geosearchstore":       georadius(geoquery{at: 3, search: true, storeFirst: true}),
	"lcs":                  cmdLCS,
	"lmove":                cmdLMove,
	"lmpop":                cmdLMPop,
	"move":                 cmdMove,
	"msetnx":               cmdMSetNX,
	"pfcount":              cmdPFCount,
	"pfmerge":              cmdPFMerge,
	"rename":               cmdRename,
	"renamenx":             cmdRenameNX,
	"rpoplpush":            cmdRPopLPush,
	"sdiff":                cmdSDiff,
	"sdiffstore":           cmdSDiffStore,
	"sinter":               cmdSInter,
	"sintercard":           cmdSInterCard,
	"sinterstore":          cmdSInterStore,
	"smove":                cmdSMove,
	"sort":                 cmdSort,
	"sort_ro":              cmdSortRO,
	"sunion":               cmdSUnion,
	"sunionstore":          cmdSUnionStore,
	"zdiff":                zcombine("zdiff", subtractSets, 1),
	"zdiffstore":           zcombine("zdiffstore", subtractSets, 2),
	"zinter":               zcombine("zinter", intersectSets, 1),
	"zintercard":           zcombine("zintercard", intersectSets, 1),
	"zinterstore":          zcombine("zinterstore", intersectSets, 2),
	"zmpop":                cmdZMPop,
	"zrangestore":          cmdZRangeStore,
	"zunion":               zcombine("zunion", uniteSets, 1),
	"zunionstore":          zcombine("zunionstore", uniteSets, 2),
}

// WaitingFor are the readers of the arguments of those that may wait.
var WaitingFor = map[string]WaitFunc{
	"blmove":     parseBLMove,
	"blmpop":     parseBLMPop,
	"blpop":      parseBPop(true),
	"brpop":      parseBPop(false),
	"brpoplpush": parseBRPopLPush,
	"bzmpop":     parseBZMPop,
	"bzpopmax":   parseBZPop(true),
	"bzpopmin":   parseBZPop(false),
	"xread":      parseRead(false),
	"xreadgroup": parseRead(true),
}

// Keys are what a command on several keys works on. All of its methods are about the one try that the command is a
// part of, and for its goroutine.
type Keys interface {
	// Key is the key of a name in the current database, read when it is first asked for. That it stays as it was read
	// is a condition of all that is written.
	Key(name []byte) *Key
	// KeyIn is a key of another database.
	KeyIn(db int, name []byte) *Key
	// Peek is Key without the condition.
	Peek(name []byte) *Key
	// Load reads keys together that the command may ask for. It makes no conditions.
	Load(names ...[]byte)
	// Possible reports whether a key may have such a name.
	Possible(name []byte) bool

	// Take takes n bytes of memory until all of it is over. Without them it gives all of it up.
	Take(n int64) bool
	// Fail gives all of it up, with that reply in the place of all others.
	Fail(reply ResultError)
	// Failure is why all of it was given up, nil if it was not. The command has no effect then.
	Failure() error

	// Name gives what the command does to a key an event of its own.
	Name(k *Key, class EventClass, event string)
	// Miss notes a name that led to no key.
	Miss(name []byte)

	// Current is the number of the database that names are of.
	Current() int
	// DBIndex reads the number of another one.
	DBIndex(b []byte) (db int, err error)
	// Together reports whether keys of that and the current one change in one step.
	Together(db int) bool
	// Waits reports whether the command goes on waiting if it finds nothing.
	Waits() bool
	// ReadsEverything reports whether the user of the command with these arguments may read every key by it.
	ReadsEverything(args [][]byte) bool
}

// Blocking is what a command that may wait asks for.
// It is made for each command, and its names are the command's arguments, which stay until the connection has replied.
type Blocking struct {
	Names   [][]byte      // that it waits for
	Timeout time.Duration // from the first try on; 0: for ever; NoWait: it does not wait
	// Line is which of those who wait for a key it is served in turn with: those who take what it takes.
	Line string
	// Reads: it has to look at its keys before it waits, whoever does so already. If it has no line nobody is in its
	// way afterwards, since it takes nothing.
	Reads bool
	// A transaction never waits. With One the reply to nothing is one value there, and no array.
	One bool
	// Try does it now, if it can, for the first of the given names that has something. It reports whether it replied,
	// unless the error is its reply. again says that the client has waited: a key of a wrong type is then like none, as
	// in Redis.
	Try func(t Keys, names [][]byte, again bool, w *resp.Writer) (found bool, err error)
}

// LineOfLists and LineOfZSets are the lines of those who wait for a list and for a sorted set. Readers of a stream have
// none, or their group's.
const LineOfLists, LineOfZSets = "list", "sorted set"

// NoWait is the timeout of a command that was not told to wait.
const NoWait = time.Duration(-1)

// ResultError is a reply that takes the place of all others.
// An EXEC, for one, replies it instead of the array. It is in Redis's form, with the class of the error first.
type ResultError string

func (e ResultError) Error() string { return string(e) }
