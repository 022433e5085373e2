package gateway

import (
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/values"
)

// hashCommands are on one hash each. They work on its bytes (package collection), which those that write copy first,
// and look at arguments, the type and fields in the order of Redis's t_hash.c.
func hashCommands() []*command {
	return ofGroup("hash",
		keyed("hset", -4, 1, update, "Sets fields."),
		keyed("hmset", -4, 1, update, "Sets fields."),
		keyed("hsetnx", 4, 1, update, "Sets a field that does not exist."),
		keyed("hget", 3, 1, read, "Returns the value of a field."),
		keyed("hmget", -3, 1, read, "Returns the values of fields."),
		keyed("hgetall", 2, 1, read, "Returns all fields and their values."),
		keyed("hkeys", 2, 1, read, "Returns all fields."),
		keyed("hvals", 2, 1, read, "Returns the values of all fields."),
		keyed("hlen", 2, 1, read, "Counts the fields."),
		keyed("hstrlen", 3, 1, read, "Returns the length of a field's value."),
		keyed("hexists", 3, 1, read, "Says whether there is a field."),
		keyed("hdel", -3, 1, update, "Deletes fields."),
		keyed("hincrby", 4, 1, update, "Adds to an integer in a field."),
		keyed("hincrbyfloat", 4, 1, update, "Adds to a floating-point number in a field."),
		keyed("hrandfield", -2, 1, read, "Returns random fields."),
		keyed("hscan", -3, 1, read, "Iterates over the fields."),
	)
}

// ofGroup puts commands in a group of COMMAND DOCS.
// A container is put in it with no word to its subcommands, which container has seen to already.
func ofGroup(group string, cmds ...*command) []*command {
	for _, c := range cmds {
		c.group = group
	}
	return cmds
}

// setCommands are on sets: on one, as those on hashes, or on several at once. They look at arguments, types and members
// in the order of Redis's t_set.c.
func setCommands() []*command {
	return ofGroup("set",
		keyed("sadd", -3, 1, update, "Adds members."),
		keyed("srem", -3, 1, update, "Removes members."),
		keyed("sismember", 3, 1, read, "Says whether there is a member."),
		keyed("smismember", -3, 1, read, "Says of each whether it is a member."),
		keyed("scard", 2, 1, read, "Counts the members."),
		keyed("smembers", 2, 1, read, "Returns all members."),
		keyed("spop", -2, 1, update, "Removes random members, and returns them."),
		keyed("srandmember", -2, 1, read, "Returns random members."),
		keyed("sscan", -3, 1, read, "Iterates over the members."),
		writes(onKeys("smove", 4, 1, 2, 1, "", "Moves a member to another set.")),
		onKeys("sinter", -2, 1, -1, 1, "", "Returns the members that all sets have."),
		countedAt(1, onKeys("sintercard", -3, 0, 0, 0, "", "Counts the members that all sets have.")),
		writes(onKeys("sinterstore", -3, 1, -1, 1, "", "Stores the members that all sets have.")),
		onKeys("sunion", -2, 1, -1, 1, "", "Returns the members that any of the sets has."),
		writes(onKeys("sunionstore", -3, 1, -1, 1, "", "Stores the members that any of the sets has.")),
		onKeys("sdiff", -2, 1, -1, 1, "", "Returns the members that the first set has and no other."),
		writes(onKeys("sdiffstore", -3, 1, -1, 1, "", "Stores the members that the first set has and no other.")),
	)
}

func sortedSetCommands() []*command {
	list := []*command{
		keyed("zadd", -4, 1, update, "Adds members, or changes their scores."),
		keyed("zincrby", 4, 1, update, "Adds to the score of a member."),
		keyed("zrem", -3, 1, update, "Removes members."),
		keyed("zremrangebyrank", 4, 1, update, "Removes a range of ranks."),
		keyed("zremrangebyscore", 4, 1, update, "Removes a range of scores."),
		keyed("zremrangebylex", 4, 1, update, "Removes a range of members of equal score."),
		keyed("zpopmin", -2, 1, update, "Removes the members of lowest score and returns them."),
		keyed("zpopmax", -2, 1, update, "Removes the members of highest score and returns them."),
		keyed("zcard", 2, 1, read, "Returns the number of members."),
		keyed("zcount", 4, 1, read, "Counts a range of scores."),
		keyed("zlexcount", 4, 1, read, "Counts a range of members of equal score."),
		keyed("zscore", 3, 1, read, "Returns the score of a member."),
		keyed("zmscore", -3, 1, read, "Returns the scores of members."),
		keyed("zrank", 3, 1, read, "Returns the rank of a member, from the lowest score on."),
		keyed("zrevrank", 3, 1, read, "Returns the rank of a member, from the highest score on."),
		keyed("zrange", -4, 1, read, "Returns a range of ranks, scores or members."),
		keyed("zrevrange", -4, 1, read, "Returns a range of ranks, from the highest score on."),
		keyed("zrangebyscore", -4, 1, read, "Returns a range of scores."),
		keyed("zrevrangebyscore", -4, 1, read, "Returns a range of scores, from the highest on."),
		keyed("zrangebylex", -4, 1, read, "Returns a range of members of equal score."),
		keyed("zrevrangebylex", -4, 1, read, "Returns a range of members of equal score, from the last on."),
		keyed("zrandmember", -2, 1, read, "Returns random members."),
		keyed("zscan", -3, 1, read, "Iterates over members and scores."),
	}
	return ofGroup("sorted-set", slices.Concat(list, combiningCommands())...)
}

// combiningCommands are those on several sorted sets. Sets without scores may take part: their members have the score
// 1.
func combiningCommands() []*command {
	return []*command{
		countedAt(1, onKeys("zunion", -3, 0, 0, 0, "", "Returns the members of any of several sorted sets.")),
		countedAt(1, onKeys("zinter", -3, 0, 0, 0, "", "Returns the members of all of several sorted sets.")),
		countedAt(1, onKeys("zdiff", -3, 0, 0, 0, "", "Returns the members of a sorted set that are in no other one.")),
		countedAt(1, onKeys("zintercard", -3, 0, 0, 0, "", "Counts the members of all of several sorted sets.")),
		writes(countedAt(2, onKeys("zunionstore", -4, 1, 1, 1, "",
			"Stores the members of any of several sorted sets."))),
		writes(countedAt(2, onKeys("zinterstore", -4, 1, 1, 1, "",
			"Stores the members of all of several sorted sets."))),
		writes(countedAt(2, onKeys("zdiffstore", -4, 1, 1, 1, "",
			"Stores the members of a sorted set that are in no other one."))),
		writes(onKeys("zrangestore", -5, 1, 2, 1, "", "Stores a range of a sorted set.")),
		writes(countedAt(1, onKeys("zmpop", -4, 0, 0, 0, "", "Removes members from the first of several "+
			"sorted sets that has some."))),
		blockingOn("bzpopmin", -3, 1, -2, 1, "",
			"Removes the member of lowest score and returns it, or waits for one."),
		blockingOn("bzpopmax", -3, 1, -2, 1, "",
			"Removes the member of highest score and returns it, or waits for one."),
		countedAt(2, blockingOn("bzmpop", -5, 0, 0, 0, "",
			"Removes members from the first of several sorted sets that has some, or waits for one.")),
	}
}

// listCommands are on one list, on several, or wait for one.
func listCommands() []*command {
	all := []*command{
		keyed("lpush", -3, 1, update, "Prepends elements to a list."),
		keyed("rpush", -3, 1, update, "Appends elements to a list."),
		keyed("lpushx", -3, 1, update, "Prepends elements to a list that exists."),
		keyed("rpushx", -3, 1, update, "Appends elements to a list that exists."),
		keyed("lpop", -2, 1, update, "Removes and returns the first elements."),
		keyed("rpop", -2, 1, update, "Removes and returns the last elements."),
		keyed("llen", 2, 1, read, "Returns the length of a list."),
		keyed("lindex", 3, 1, read, "Returns an element by its index."),
		keyed("lrange", 4, 1, read, "Returns a range of elements."),
		keyed("lpos", -3, 1, read, "Returns the indices of matching elements."),
		keyed("linsert", 5, 1, update, "Inserts an element before or after another."),
		keyed("lset", 4, 1, update, "Sets an element by its index."),
		keyed("lrem", 4, 1, update, "Removes elements by their value."),
		keyed("ltrim", 4, 1, update, "Removes elements from both ends."),
		writes(onKeys("lmove", 5, 1, 2, 1, "list", "Moves an element from one list to another.")),
		writes(onKeys("rpoplpush", 3, 1, 2, 1, "list", "Moves the last element of a list to the head of another.")),
		countedAt(1, writes(onKeys("lmpop", -4, 0, 0, 0, "list", "Pops elements from the first list that "+
			"is not empty."))),
		blockingOn("blpop", -3, 1, -2, 1, "list", "Pops the first element of a list, or waits for one."),
		blockingOn("brpop", -3, 1, -2, 1, "list", "Pops the last element of a list, or waits for one."),
		blockingOn("blmove", 6, 1, 2, 1, "list", "Moves an element from one list to another, or waits for one."),
		blockingOn("brpoplpush", 4, 1, 2, 1, "list",
			"Moves the last element of a list to the head of another, or waits for one."),
		countedAt(2, blockingOn("blmpop", -5, 0, 0, 0, "list",
			"Pops elements from the first list that is not empty, or waits for one.")),
	}
	for _, c := range all {
		c.group = "list"
	}
	return all
}

func geoCommands() []*command {
	radius := onKeys("georadius", -6, 1, 1, 1, "", "Returns or stores the positions around a place.")
	byMember := onKeys("georadiusbymember", -5, 1, 1, 1, "", "Returns or stores the positions around a member.")
	radius.spans, byMember.spans = storeSpans(6), storeSpans(5)
	return ofGroup("geo",
		keyed("geoadd", -5, 1, update, "Adds positions."),
		keyed("geodist", -4, 1, read, "Returns the distance between two members."),
		keyed("geohash", -2, 1, read, "Returns the geohashes of members."),
		keyed("geopos", -2, 1, read, "Returns the positions of members."),
		writes(radius),
		onKeys("georadius_ro", -6, 1, 1, 1, "", "Returns the positions around a place."),
		writes(byMember),
		onKeys("georadiusbymember_ro", -5, 1, 1, 1, "", "Returns the positions around a member."),
		onKeys("geosearch", -7, 1, 1, 1, "", "Returns the positions within a circle or a box."),
		writes(onKeys("geosearchstore", -8, 1, 2, 1, "", "Stores the positions within a circle or a box.")),
	)
}

// bitCommands are on strings, but in a group of their own.
func bitCommands() []*command {
	return ofGroup("bitmap",
		keyed("setbit", 4, 1, update, "Sets a bit of the value."),
		keyed("getbit", 3, 1, readValue, "Returns a bit of the value.").needing(values.BitPart),
		keyed("bitcount", -2, 1, readValue, "Counts the bits that are set."),
		keyed("bitpos", -3, 1, readValue, "Finds the first bit that is set, or is not."),
		keyed("bitfield", -2, 1, update, "Reads and changes integers of any width in the value."),
		keyed("bitfield_ro", -2, 1, readValue, "Reads integers of any width in the value."),
		writes(onKeys("bitop", -4, 2, -1, 1, "bitmap", "Combines the bits of several values.")),
	)
}

// hyperLogLogCommands are on strings, but in a group of their own.
func hyperLogLogCommands() []*command {
	return ofGroup("hyperloglog",
		keyed("pfadd", -2, 1, update, "Counts elements."),
		onKeys("pfcount", -2, 1, -1, 1, "hyperloglog", "Estimates how many different elements were counted."),
		writes(onKeys("pfmerge", -2, 1, -1, 1, "hyperloglog", "Makes one that has counted what others have.")),
		keyed("pfdebug", 3, 2, update, "Shows how elements are counted."),
		onConn("pfselftest", 1, "hyperloglog", replyOK, "Does nothing: it is tested elsewhere."),
	)
}

// sortCommands need not name their keys in one place.
func sortCommands() []*command {
	c := writes(onKeys("sort", -2, 1, 1, 1, "generic", "Sorts a list, set or sorted set."))
	c.spans = sortSpans
	return []*command{c,
		onKeys("sort_ro", -2, 1, 1, 1, "generic", "Sorts a list, set or sorted set, and writes nothing."),
		keyed("dump", 2, 1, read, "Returns the value, serialized."),
		keyed("restore", -4, 1, update, "Makes a key of a serialized value."),
		keyed("restore-asking", -4, 1, update, "Is RESTORE."),
	}
}

// streamCommands are on one stream, but for XREAD and XREADGROUP, which may wait for several.
func streamCommands() []*command {
	return ofGroup("stream",
		onStreams("xadd", keyed("xadd", -5, 1, update, "Appends an entry to a stream.")),
		keyed("xlen", 2, 1, read, "Counts the entries of a stream."),
		keyed("xrange", -4, 1, read, "Returns entries by their ids."),
		keyed("xrevrange", -4, 1, read, "Returns entries by their ids, in reverse."),
		onStreams("xdel", keyed("xdel", -3, 1, update, "Deletes entries.")),
		onStreams("xtrim", keyed("xtrim", -4, 1, update, "Deletes the first entries.")),
		onStreams("xsetid", keyed("xsetid", -3, 1, update, "Sets the last id of a stream.")),
		blockingRead("xread", -4, false, "Returns entries of several streams, or waits for some."),
		blockingRead("xreadgroup", -7, true, "Returns entries to a consumer of a group, or waits for some."),
		onStreams("", keyed("xack", -4, 1, update, "Says that entries have been dealt with.")),
		keyed("xpending", -3, 1, read, "Returns what has been delivered and not acknowledged."),
		onStreams("", keyed("xclaim", -6, 1, update, "Gives pending entries to another consumer.")),
		onStreams("", keyed("xautoclaim", -6, 1, update,
			"Gives entries that are pending for long to another consumer.")),
		container("xgroup", "stream", "Consumer groups.", nil,
			onStreams("xgroup-create", keyed("xgroup|create", -5, 2, update, "Makes a group.")),
			onStreams("xgroup-setid", keyed("xgroup|setid", -5, 2, update, "Sets the last id that a group has read.")),
			onStreams("xgroup-destroy", keyed("xgroup|destroy", 4, 2, update, "Removes a group.")),
			onStreams("xgroup-createconsumer", keyed("xgroup|createconsumer", 5, 2, update, "Makes a consumer.")),
			onStreams("xgroup-delconsumer", keyed("xgroup|delconsumer", 5, 2, update, "Removes a consumer.")),
			helpOf("xgroup", strings.Split(xgroupHelp, "\n")...)),
		container("xinfo", "stream", "Tells of streams, groups and consumers.", nil,
			keyed("xinfo|stream", -3, 2, read, "Tells of a stream."),
			keyed("xinfo|groups", 3, 2, read, "Tells of the groups of a stream."),
			keyed("xinfo|consumers", 4, 2, read, "Tells of the consumers of a group."),
			helpOf("xinfo", strings.Split(xinfoHelp, "\n")...)),
	)
}

const (
	// The texts are Redis's, which clients print as they come.
	xgroupHelp = `CREATE <key> <groupname> <id|$> [option]
    Create a new consumer group. Options are:
    * MKSTREAM
      Create the empty stream if it does not exist.
    * ENTRIESREAD entries_read
      Set the group's entries_read counter (internal use).
CREATECONSUMER <key> <groupname> <consumer>
    Create a new consumer in the specified group.
DELCONSUMER <key> <groupname> <consumer>
    Remove the specified consumer.
DESTROY <key> <groupname>
    Remove the specified group.
SETID <key> <groupname> <id|$> [ENTRIESREAD entries_read]
    Set the current group ID and entries_read counter.`
	xinfoHelp = `CONSUMERS <key> <groupname>
    Show consumers of <groupname>.
GROUPS <key>
    Show the stream consumer groups.
STREAM <key> [FULL [COUNT <count>]
    Show information about the stream.`
)

// onStreams names the event of a command that changes a stream; "": it has none.
// An event "" keeps nameEvents from giving the command's own name to one.
func onStreams(event string, c *command) *command {
	if c.event = (keyEvent{values.OnStream, event}); event == "" {
		c.event.class = values.OnNothing
	}
	return c
}

// blockingRead makes XREAD or XREADGROUP.
func blockingRead(name string, arity int, ofGroup bool, summary string) *command {
	c := blockingOn(name, arity, 0, 0, 0, "stream", summary)
	c.spans = readSpans
	if ofGroup {
		c.spans = groupReadSpans
	}
	if c.write = ofGroup; ofGroup {
		return onStreams("", c)
	}
	return c
}
