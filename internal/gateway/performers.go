package gateway

import (
	"time"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

// Functions perform commands on keys, and are found by the command's name in lower case. All else about a command is in
// its row (table.go, valuerows.go), which names no function.

// A keyFunc is a command on one key: it appends its one reply and changes the key. An error is its reply instead.
// It depends on nothing else, and may run several times.
type keyFunc func(k *key, args [][]byte, w *resp.Writer) error

// A severalFunc is a command on several keys: it appends its one reply to w and changes keys of t. An error is its
// reply instead.
type severalFunc func(t Keys, args [][]byte, w *resp.Writer) error

// A waitFunc reads the arguments of a command that may wait. It may keep them.
type waitFunc func(args [][]byte) (blocking, error)

// oneKey are the commands on one key. It does not change.
var oneKey = map[string]keyFunc{
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
	"incrbyfloat":  cmdIncrByFloat,
	"lindex":       cmdLIndex,
	"linsert":      cmdLInsert,
	"llen":         cmdLLen,
	"lpop": func(k *key, args [][]byte, w *resp.Writer) error {
		return pop(k, args, w, "lpop", true)
	},
	"lpos": cmdLPos,
	"lpush": func(k *key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, true, false)
	},
	"lpushx": func(k *key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, true, true)
	},
	"lrange":          cmdLRange,
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
	"rpop": func(k *key, args [][]byte, w *resp.Writer) error {
		return pop(k, args, w, "rpop", false)
	},
	"rpush": func(k *key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, false, false)
	},
	"rpushx": func(k *key, args [][]byte, w *resp.Writer) error {
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
	"xrange": func(k *key, args [][]byte, w *resp.Writer) error {
		return xrange(k, args, w, false)
	},
	"xrevrange": func(k *key, args [][]byte, w *resp.Writer) error {
		return xrange(k, args, w, true)
	},
	"xsetid": cmdXSetID,
	"xtrim":  cmdXTrim,
	"zadd":   cmdZAdd,
	"zcard":  cmdZCard,
	"zcount": func(k *key, args [][]byte, w *resp.Writer) error {
		return zcount(k, args, w, byScore)
	},
	"zincrby": cmdZIncrBy,
	"zlexcount": func(k *key, args [][]byte, w *resp.Writer) error {
		return zcount(k, args, w, byLex)
	},
	"zmscore": cmdZMScore,
	"zpopmax": func(k *key, args [][]byte, w *resp.Writer) error {
		return zpop(k, args, w, true)
	},
	"zpopmin": func(k *key, args [][]byte, w *resp.Writer) error {
		return zpop(k, args, w, false)
	},
	"zrandmember": cmdZRandMember,
	"zrange": func(k *key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{auto: true})
	},
	"zrangebylex": func(k *key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byLex})
	},
	"zrangebyscore": func(k *key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byScore})
	},
	"zrank": func(k *key, args [][]byte, w *resp.Writer) error {
		return zrank(k, args, w, false)
	},
	"zrem": cmdZRem,
	"zremrangebylex": func(k *key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byLex)
	},
	"zremrangebyrank": func(k *key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byRank)
	},
	"zremrangebyscore": func(k *key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byScore)
	},
	"zrevrange": func(k *key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{rev: true})
	},
	"zrevrangebylex": func(k *key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byLex, rev: true})
	},
	"zrevrangebyscore": func(k *key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byScore, rev: true})
	},
	"zrevrank": func(k *key, args [][]byte, w *resp.Writer) error {
		return zrank(k, args, w, true)
	},
	"zscan":  cmdZScan,
	"zscore": cmdZScore,
}

// severalKeys are those on several keys at once, but for scripts, libraries and those that may wait.
var severalKeys = map[string]severalFunc{
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

// waitingFor are the readers of the arguments of those that may wait.
var waitingFor = map[string]waitFunc{
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
	// key is the key of a name in the current database, read when it is first asked for. That it stays as it was read
	// is a condition of all that is written.
	key(name []byte) *key
	// keyIn is a key of another database.
	keyIn(db int, name []byte) *key
	// peek is key without the condition.
	peek(name []byte) *key
	// load reads keys together that the command may ask for. It makes no conditions.
	load(names ...[]byte)
	// possible reports whether a key may have such a name.
	possible(name []byte) bool

	// take takes so many bytes of memory until all of it is over. Without them it gives all of it up.
	take(n int64) bool
	// fail gives all of it up, with that reply in the place of all others. failure is why that has been done, nil if
	// it has not: what the command does from then on has no effect.
	fail(reply resultError)
	failure() error

	// name gives what the command does to a key an event of its own, and miss notes a name that led to no key.
	name(k *key, class eventClass, event string)
	miss(name []byte)

	// current is the number of the database that names are of, and dbIndex reads the number of another one. together
	// reports whether keys of both change in one step.
	current() int
	dbIndex(b []byte) (db int, err error)
	together(db int) bool
	// waits reports whether the command goes on waiting if it finds nothing.
	waits() bool
	// readsEverything reports whether the user of the command with these arguments may read every key by it.
	readsEverything(args [][]byte) bool
}

// blocking is what a command that may wait asks for.
// It is made for each command, and its names are the command's arguments, which stay until the connection has replied.
type blocking struct {
	names   [][]byte      // that it waits for
	timeout time.Duration // from the first try on; 0: for ever; noWait: it does not wait
	// line is which of those who wait for a key it is served in turn with: those who take what it takes. reads: it has
	// to look at its keys before it waits, whoever does so already, and if it has no line nobody is in its way
	// afterwards, since it takes nothing.
	line  string
	reads bool
	// one: in a transaction, which never waits, its reply to nothing is no array but one value.
	one bool
	// try does it now, if it can, for the first of the given names that has something; it reports whether it replied,
	// unless the error is its reply. again says that the client has waited: a key of a wrong type is then like none, as
	// in Redis.
	try func(t Keys, names [][]byte, again bool, w *resp.Writer) (found bool, err error)
}

// The lines of those who wait for a list and for a sorted set. Readers of a stream have none, or their group's.
const lineOfLists, lineOfZSets = "list", "sorted set"

// noWait is the timeout of a command that was not told to wait.
const noWait = time.Duration(-1)

// resultError is a reply that takes the place of all others.
// An EXEC, for one, replies it instead of the array. It is in Redis's form, with the class of the error first.
type resultError string

func (e resultError) Error() string { return string(e) }
