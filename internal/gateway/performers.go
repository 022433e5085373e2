package gateway

import "github.com/kvd-project/kvd/internal/redis/resp"

// What performs a command, by its name in lower case. What else there is to know of it is in its row (table.go), which
// names no function.

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
