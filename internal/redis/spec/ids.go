// Code generated from commands.jsonl; DO NOT EDIT.

package spec

// The commands.
const (
	CmdGet                    ID = iota // get
	CmdSet                              // set
	CmdSetnx                            // setnx
	CmdSetex                            // setex
	CmdPsetex                           // psetex
	CmdGetset                           // getset
	CmdGetdel                           // getdel
	CmdGetex                            // getex
	CmdAppend                           // append
	CmdStrlen                           // strlen
	CmdGetrange                         // getrange
	CmdSubstr                           // substr
	CmdSetrange                         // setrange
	CmdIncr                             // incr
	CmdDecr                             // decr
	CmdIncrby                           // incrby
	CmdDecrby                           // decrby
	CmdIncrbyfloat                      // incrbyfloat
	CmdMget                             // mget
	CmdMset                             // mset
	CmdDel                              // del
	CmdUnlink                           // unlink
	CmdExists                           // exists
	CmdTouch                            // touch
	CmdType                             // type
	CmdTtl                              // ttl
	CmdPttl                             // pttl
	CmdExpiretime                       // expiretime
	CmdPexpiretime                      // pexpiretime
	CmdPersist                          // persist
	CmdExpire                           // expire
	CmdPexpire                          // pexpire
	CmdExpireat                         // expireat
	CmdPexpireat                        // pexpireat
	CmdObject                           // object
	CmdObjectEncoding                   // object encoding
	CmdObjectFreq                       // object freq
	CmdObjectHelp                       // object help
	CmdObjectIdletime                   // object idletime
	CmdObjectRefcount                   // object refcount
	CmdMemory                           // memory
	CmdMemoryDoctor                     // memory doctor
	CmdMemoryHelp                       // memory help
	CmdMemoryMallocStats                // memory malloc-stats
	CmdMemoryPurge                      // memory purge
	CmdMemoryStats                      // memory stats
	CmdMemoryUsage                      // memory usage
	CmdHset                             // hset
	CmdHmset                            // hmset
	CmdHsetnx                           // hsetnx
	CmdHget                             // hget
	CmdHmget                            // hmget
	CmdHgetall                          // hgetall
	CmdHkeys                            // hkeys
	CmdHvals                            // hvals
	CmdHlen                             // hlen
	CmdHstrlen                          // hstrlen
	CmdHexists                          // hexists
	CmdHdel                             // hdel
	CmdHincrby                          // hincrby
	CmdHincrbyfloat                     // hincrbyfloat
	CmdHrandfield                       // hrandfield
	CmdHscan                            // hscan
	CmdSadd                             // sadd
	CmdSrem                             // srem
	CmdSismember                        // sismember
	CmdSmismember                       // smismember
	CmdScard                            // scard
	CmdSmembers                         // smembers
	CmdSpop                             // spop
	CmdSrandmember                      // srandmember
	CmdSscan                            // sscan
	CmdSmove                            // smove
	CmdSinter                           // sinter
	CmdSintercard                       // sintercard
	CmdSinterstore                      // sinterstore
	CmdSunion                           // sunion
	CmdSunionstore                      // sunionstore
	CmdSdiff                            // sdiff
	CmdSdiffstore                       // sdiffstore
	CmdScan                             // scan
	CmdKeys                             // keys
	CmdRandomkey                        // randomkey
	CmdDbsize                           // dbsize
	CmdFlushdb                          // flushdb
	CmdFlushall                         // flushall
	CmdRename                           // rename
	CmdRenamenx                         // renamenx
	CmdCopy                             // copy
	CmdMove                             // move
	CmdLcs                              // lcs
	CmdMsetnx                           // msetnx
	CmdSwapdb                           // swapdb
	CmdMulti                            // multi
	CmdExec                             // exec
	CmdDiscard                          // discard
	CmdWatch                            // watch
	CmdUnwatch                          // unwatch
	CmdPing                             // ping
	CmdEcho                             // echo
	CmdQuit                             // quit
	CmdReset                            // reset
	CmdAuth                             // auth
	CmdHello                            // hello
	CmdSelect                           // select
	CmdClient                           // client
	CmdClientCaching                    // client caching
	CmdClientGetname                    // client getname
	CmdClientGetredir                   // client getredir
	CmdClientHelp                       // client help
	CmdClientId                         // client id
	CmdClientInfo                       // client info
	CmdClientKill                       // client kill
	CmdClientList                       // client list
	CmdClientNoEvict                    // client no-evict
	CmdClientNoTouch                    // client no-touch
	CmdClientPause                      // client pause
	CmdClientReply                      // client reply
	CmdClientSetinfo                    // client setinfo
	CmdClientSetname                    // client setname
	CmdClientTracking                   // client tracking
	CmdClientTrackinginfo               // client trackinginfo
	CmdClientUnblock                    // client unblock
	CmdClientUnpause                    // client unpause
	CmdCommand                          // command
	CmdCommandCount                     // command count
	CmdCommandDocs                      // command docs
	CmdCommandGetkeys                   // command getkeys
	CmdCommandGetkeysandflags           // command getkeysandflags
	CmdCommandHelp                      // command help
	CmdCommandInfo                      // command info
	CmdCommandList                      // command list
	CmdInfo                             // info
	CmdConfig                           // config
	CmdConfigGet                        // config get
	CmdConfigHelp                       // config help
	CmdConfigResetstat                  // config resetstat
	CmdConfigRewrite                    // config rewrite
	CmdConfigSet                        // config set
	CmdDebug                            // debug
	CmdAcl                              // acl
	CmdAclCat                           // acl cat
	CmdAclDeluser                       // acl deluser
	CmdAclDryrun                        // acl dryrun
	CmdAclGenpass                       // acl genpass
	CmdAclGetuser                       // acl getuser
	CmdAclHelp                          // acl help
	CmdAclList                          // acl list
	CmdAclLoad                          // acl load
	CmdAclLog                           // acl log
	CmdAclSave                          // acl save
	CmdAclSetuser                       // acl setuser
	CmdAclUsers                         // acl users
	CmdAclWhoami                        // acl whoami
	CmdModule                           // module
	CmdModuleHelp                       // module help
	CmdModuleList                       // module list
	CmdMonitor                          // monitor
	CmdTime                             // time
	CmdWait                             // wait
	CmdRole                             // role
	CmdLolwut                           // lolwut
	CmdLastsave                         // lastsave
	CmdSlowlog                          // slowlog
	CmdSlowlogGet                       // slowlog get
	CmdSlowlogHelp                      // slowlog help
	CmdSlowlogLen                       // slowlog len
	CmdSlowlogReset                     // slowlog reset
	CmdLatency                          // latency
	CmdLatencyDoctor                    // latency doctor
	CmdLatencyGraph                     // latency graph
	CmdLatencyHelp                      // latency help
	CmdLatencyHistogram                 // latency histogram
	CmdLatencyHistory                   // latency history
	CmdLatencyLatest                    // latency latest
	CmdLatencyReset                     // latency reset
	CmdZadd                             // zadd
	CmdZincrby                          // zincrby
	CmdZrem                             // zrem
	CmdZremrangebyrank                  // zremrangebyrank
	CmdZremrangebyscore                 // zremrangebyscore
	CmdZremrangebylex                   // zremrangebylex
	CmdZpopmin                          // zpopmin
	CmdZpopmax                          // zpopmax
	CmdZcard                            // zcard
	CmdZcount                           // zcount
	CmdZlexcount                        // zlexcount
	CmdZscore                           // zscore
	CmdZmscore                          // zmscore
	CmdZrank                            // zrank
	CmdZrevrank                         // zrevrank
	CmdZrange                           // zrange
	CmdZrevrange                        // zrevrange
	CmdZrangebyscore                    // zrangebyscore
	CmdZrevrangebyscore                 // zrevrangebyscore
	CmdZrangebylex                      // zrangebylex
	CmdZrevrangebylex                   // zrevrangebylex
	CmdZrandmember                      // zrandmember
	CmdZscan                            // zscan
	CmdZunion                           // zunion
	CmdZinter                           // zinter
	CmdZdiff                            // zdiff
	CmdZintercard                       // zintercard
	CmdZunionstore                      // zunionstore
	CmdZinterstore                      // zinterstore
	CmdZdiffstore                       // zdiffstore
	CmdZrangestore                      // zrangestore
	CmdZmpop                            // zmpop
	CmdBzpopmin                         // bzpopmin
	CmdBzpopmax                         // bzpopmax
	CmdBzmpop                           // bzmpop
	CmdGeoadd                           // geoadd
	CmdGeodist                          // geodist
	CmdGeohash                          // geohash
	CmdGeopos                           // geopos
	CmdGeoradius                        // georadius
	CmdGeoradiusRo                      // georadius_ro
	CmdGeoradiusbymember                // georadiusbymember
	CmdGeoradiusbymemberRo              // georadiusbymember_ro
	CmdGeosearch                        // geosearch
	CmdGeosearchstore                   // geosearchstore
	CmdLpush                            // lpush
	CmdRpush                            // rpush
	CmdLpushx                           // lpushx
	CmdRpushx                           // rpushx
	CmdLpop                             // lpop
	CmdRpop                             // rpop
	CmdLlen                             // llen
	CmdLindex                           // lindex
	CmdLrange                           // lrange
	CmdLpos                             // lpos
	CmdLinsert                          // linsert
	CmdLset                             // lset
	CmdLrem                             // lrem
	CmdLtrim                            // ltrim
	CmdLmove                            // lmove
	CmdRpoplpush                        // rpoplpush
	CmdLmpop                            // lmpop
	CmdBlpop                            // blpop
	CmdBrpop                            // brpop
	CmdBlmove                           // blmove
	CmdBrpoplpush                       // brpoplpush
	CmdBlmpop                           // blmpop
	CmdEval                             // eval
	CmdEvalsha                          // evalsha
	CmdEvalRo                           // eval_ro
	CmdEvalshaRo                        // evalsha_ro
	CmdScript                           // script
	CmdScriptDebug                      // script debug
	CmdScriptExists                     // script exists
	CmdScriptFlush                      // script flush
	CmdScriptHelp                       // script help
	CmdScriptKill                       // script kill
	CmdScriptLoad                       // script load
	CmdFcall                            // fcall
	CmdFcallRo                          // fcall_ro
	CmdFunction                         // function
	CmdFunctionDelete                   // function delete
	CmdFunctionDump                     // function dump
	CmdFunctionFlush                    // function flush
	CmdFunctionHelp                     // function help
	CmdFunctionKill                     // function kill
	CmdFunctionList                     // function list
	CmdFunctionLoad                     // function load
	CmdFunctionRestore                  // function restore
	CmdFunctionStats                    // function stats
	CmdSetbit                           // setbit
	CmdGetbit                           // getbit
	CmdBitcount                         // bitcount
	CmdBitpos                           // bitpos
	CmdBitfield                         // bitfield
	CmdBitfieldRo                       // bitfield_ro
	CmdBitop                            // bitop
	CmdPfadd                            // pfadd
	CmdPfcount                          // pfcount
	CmdPfmerge                          // pfmerge
	CmdPfdebug                          // pfdebug
	CmdPfselftest                       // pfselftest
	CmdSort                             // sort
	CmdSortRo                           // sort_ro
	CmdDump                             // dump
	CmdRestore                          // restore
	CmdRestoreAsking                    // restore-asking
	CmdSubscribe                        // subscribe
	CmdUnsubscribe                      // unsubscribe
	CmdPsubscribe                       // psubscribe
	CmdPunsubscribe                     // punsubscribe
	CmdSsubscribe                       // ssubscribe
	CmdSunsubscribe                     // sunsubscribe
	CmdPublish                          // publish
	CmdSpublish                         // spublish
	CmdPubsub                           // pubsub
	CmdPubsubChannels                   // pubsub channels
	CmdPubsubHelp                       // pubsub help
	CmdPubsubNumpat                     // pubsub numpat
	CmdPubsubNumsub                     // pubsub numsub
	CmdPubsubShardchannels              // pubsub shardchannels
	CmdPubsubShardnumsub                // pubsub shardnumsub
	CmdXadd                             // xadd
	CmdXlen                             // xlen
	CmdXrange                           // xrange
	CmdXrevrange                        // xrevrange
	CmdXdel                             // xdel
	CmdXtrim                            // xtrim
	CmdXsetid                           // xsetid
	CmdXread                            // xread
	CmdXreadgroup                       // xreadgroup
	CmdXack                             // xack
	CmdXpending                         // xpending
	CmdXclaim                           // xclaim
	CmdXautoclaim                       // xautoclaim
	CmdXgroup                           // xgroup
	CmdXgroupCreate                     // xgroup create
	CmdXgroupCreateconsumer             // xgroup createconsumer
	CmdXgroupDelconsumer                // xgroup delconsumer
	CmdXgroupDestroy                    // xgroup destroy
	CmdXgroupHelp                       // xgroup help
	CmdXgroupSetid                      // xgroup setid
	CmdXinfo                            // xinfo
	CmdXinfoConsumers                   // xinfo consumers
	CmdXinfoGroups                      // xinfo groups
	CmdXinfoHelp                        // xinfo help
	CmdXinfoStream                      // xinfo stream
	CmdCluster                          // cluster
	CmdClusterCountkeysinslot           // cluster countkeysinslot
	CmdClusterGetkeysinslot             // cluster getkeysinslot
	CmdClusterHelp                      // cluster help
	CmdClusterInfo                      // cluster info
	CmdClusterKeyslot                   // cluster keyslot
	CmdClusterLinks                     // cluster links
	CmdClusterMyid                      // cluster myid
	CmdClusterNodes                     // cluster nodes
	CmdClusterReplicas                  // cluster replicas
	CmdClusterShards                    // cluster shards
	CmdClusterSlaves                    // cluster slaves
	CmdClusterSlots                     // cluster slots
	CmdReadonly                         // readonly
	CmdReadwrite                        // readwrite
	CmdAsking                           // asking
	CmdMigrate                          // migrate
	CmdSave                             // save
	CmdBgsave                           // bgsave
	CmdBgrewriteaof                     // bgrewriteaof
	CmdSync                             // sync
	CmdPsync                            // psync
	CmdReplconf                         // replconf
	CmdReplicaof                        // replicaof
	CmdSlaveof                          // slaveof
	CmdFailover                         // failover
	CmdShutdown                         // shutdown
	CmdWaitaof                          // waitaof
)
