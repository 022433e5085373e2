package gateway

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// sayWrong is what both are asked before their counts are compared: commands that succeed, fail, are refused and do not
// exist, by themselves and in transactions and scripts. Commands that a script calls are counted in Redis alone, so
// scripts call what fails by itself, too.
var sayWrong = [][]string{
	{"nosuch"}, {"GET"}, {"CONFIG", "GET"}, {"SET", "s", "x"}, {"LPUSH", "s", "1"}, {"INCR", "s"}, {"INCR", "s", "1"},
	{"MGET", "s", "t"},
	{"MULTI"}, {"GET"}, {"SET", "s", "1"}, {"EXEC"},
	{"MULTI"}, {"LPUSH", "s", "1"}, {"SET", "s", "2"}, {"EXEC"},
	{"MULTI"}, {"LPUSH", "s", "1"}, {"SET", "t", "2"}, {"EXEC"},
	{"EXEC"}, {"DISCARD"},
	{"EVAL", "return redis.error_reply('MYCODE foo')", "0"}, {"EVAL", "return redis.error_reply('MY:#CODE x')", "0"},
	{"EVAL", "syntax(", "0"},
	{"EVAL", "return {redis.error_reply('A b'),{1,'-X y\\r\\n-Y z',redis.error_reply('B c')}}", "0"},
	{"EVAL", "return error('x')", "0"}, {"EVAL", "return 1", "0"},
	{"EVALSHA", strings.Repeat("f", 40), "0"}, {"SELECT", "99"}, {"HELLO", "9"}, {"AUTH", "a", "b"}, {"SUBSCRIBE"},
	{"OBJECT", "ENCODING"}, {"OBJECT", "NOSUCH"}, {"BLPOP", "s", "0"}, {"BLPOP", "k", "x"},
	{"RENAME", "none", "x"}, {"ZADD", "z", "x", "m"}, {"SET", "s", "1", "EX", "0"}, {"SET", "s", "1", "BAD"},
	{"GETSET", "s", "3"}, {"XADD", "s", "*", "a", "b"}, {"XREAD", "STREAMS", "s", "0"},
}

// TestCountsLikeRedis: INFO counts calls, failed and rejected ones by command, and errors by their first word, as a
// redis-server, and CONFIG RESETSTAT sets back what it does there.
func TestCountsLikeRedis(t *testing.T) {
	theirs, ours := dial(t, "unix", startRedis(t)), dial(t, "tcp", serve(t, Options{Databases: fake()}))
	usec := regexp.MustCompile(`usec=\d+,usec_per_call=[\d.]+`)
	show := func(p *peer) string {
		t.Helper()
		var lines []string
		for _, section := range []string{"commandstats", "errorstats"} {
			for line := range strings.SplitSeq(p.do(t, "INFO", section), "\r\n") {
				if strings.Contains(line, "stat_") && !strings.HasPrefix(line, "cmdstat_info") {
					lines = append(lines, usec.ReplaceAllString(line, "usec"))
				}
			}
		}
		for line := range strings.SplitSeq(p.do(t, "INFO", "latencystats"), "\r\n") {
			if name, _, ok := strings.Cut(line, ":"); ok && name != "latency_percentiles_usec_info" {
				lines = append(lines, name)
			}
		}
		slices.Sort(lines)
		for _, name := range []string{"total_error_replies"} {
			lines = append(lines, name+":"+infoField(t, p, "stats", name))
		}
		return strings.Join(lines, "\n")
	}
	var before [2]string
	for i, p := range []*peer{ours, theirs} {
		p.do(t, "CONFIG", "RESETSTAT")
		for _, cmd := range sayWrong {
			p.do(t, cmd...)
		}
		before[i] = show(p)
		p.do(t, "CONFIG", "RESETSTAT")
	}
	if before[0] != before[1] {
		t.Errorf("got\n%s\nwant\n%s", before[0], before[1])
	}
	if got, want := show(ours), show(theirs); got != want {
		t.Errorf("after CONFIG RESETSTAT got\n%s\nwant\n%s", got, want)
	}
}

// TestCountsAreBounded: a script that makes up first words of errors makes INFO no longer than so many.
func TestCountsAreBounded(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	p := dial(t, "tcp", addr)
	for range 300 {
		p.do(t, "EVAL", "return redis.error_reply('E'..math.random(1e9)..' x')", "0")
	}
	if n := len(slices.Collect(maps.Keys(g.tally().errors))); n > maxErrorClasses {
		t.Errorf("%d classes", n)
	}
	if got := infoField(t, p, "stats", "total_error_replies"); got != "300" {
		t.Errorf("%s errors", got)
	}
	p.do(t, "CONFIG", "SET", "latency-tracking-info-percentiles", "0 100")
	if got := infoField(t, p, "latencystats", "latency_percentiles_usec_eval"); !regexp.MustCompile(
		`^p0=\d+\.\d{3},p100=\d+\.\d{3}$`).MatchString(got) {
		t.Errorf("percentiles %q", got)
	}
	p.do(t, "CONFIG", "SET", "latency-tracking", "no")
	if got := infoField(t, p, "latencystats", "latency_percentiles_usec_eval"); got != "" {
		t.Errorf("percentiles without latency-tracking: %q", got)
	}
}

// TestMemoryStatsLikeRedis: MEMORY STATS has the fields of a redis-server.
func TestMemoryStatsLikeRedis(t *testing.T) {
	theirs, ours := dial(t, "unix", startRedis(t)), dial(t, "tcp", serve(t, Options{Databases: fake()}))
	names := func(p *peer) string {
		return strings.Join(regexp.MustCompile(`[a-z][a-z-]*\.[a-z.-]+|fragmentation\b`).FindAllString(
			p.do(t, "MEMORY", "STATS"), -1), "\n")
	}
	for _, proto := range []string{"2", "3"} {
		ours.do(t, "HELLO", proto)
		theirs.do(t, "HELLO", proto)
		if got, want := names(ours), names(theirs); got != want || want == "" {
			t.Errorf("RESP%s: got\n%s\nwant\n%s", proto, got, want)
		}
	}
}

// TestClientListCommand: CLIENT LIST tells what a client said last, by the subcommand too, as a redis-server.
func TestClientListCommand(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	servers := []func() *peer{func() *peer { return dial(t, "tcp", addr) }}
	want := []string{"client|list", "NULL", "get", "config|get", "object|encoding", "client|setname", "get", "get",
		"multi", "set", "exec", "eval", "hello", "mset", "command|count", "object|help"}
	t.Run("kvd", func(t *testing.T) { clientListCommand(t, servers[0], want) })
	t.Run("redis", func(t *testing.T) {
		sock := startRedis(t)
		clientListCommand(t, func() *peer { return dial(t, "unix", sock) }, want)
	})
}

func clientListCommand(t *testing.T, open func() *peer, want []string) {
	looks, p := open(), open()
	p.do(t, "CLIENT", "SETNAME", "p")
	says := [][]string{{"CLIENT", "LIST"}, {"NOSUCH"}, {"GET", "a"}, {"CONFIG", "GET", "x"},
		{"OBJECT", "ENCODING", "a"}, {"CLIENT", "SETNAME", "p"}, {"GeT", "a"}, {"GET"}, {"MULTI"}, {"SET", "a", "1"},
		{"EXEC"},
		{"EVAL", "return redis.call('get','a')", "0"}, {"HELLO", "2"}, {"MSET", "a", "1", "b", "2"},
		{"COMMAND", "COUNT"}, {"OBJECT", "HELP"}}
	var got []string
	for _, say := range says {
		p.do(t, say...)
		for line := range strings.SplitSeq(looks.do(t, "CLIENT", "LIST"), "\n") {
			if strings.Contains(line, " name=p ") {
				_, cmd, _ := strings.Cut(line, " cmd=")
				cmd, _, _ = strings.Cut(cmd, " ")
				got = append(got, cmd)
			}
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}
