package compat

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
)

// TestRedisCLI runs redis-cli in each of its modes.
func TestRedisCLI(t *testing.T) {
	each(t, func(t *testing.T, at target) {
		port := portOf(at.redis)
		cli := func(t *testing.T, stdin string, args ...string) string {
			t.Helper()
			out, err := output(t, stdin, append([]string{"redis-cli", "-p", port}, args...)...)
			if err != nil {
				t.Fatalf("redis-cli %s: %v\n%s", strings.Join(args, " "), err, out)
			}
			return out
		}
		says := func(t *testing.T, wanted string, args ...string) {
			t.Helper()
			equal(t, cli(t, "", args...), wanted)
		}
		says(t, "OK\n", "FLUSHALL")

		t.Run("one command", func(t *testing.T) {
			says(t, "PONG\n", "ping")
			says(t, "OK\n", "set", "k", "v")
			says(t, "v\n", "get", "k")
			says(t, "\"v\"\n", "--no-raw", "get", "k")
			says(t, "(nil)\n", "--no-raw", "get", "absent")
			says(t, "1) \"v\"\n2) (nil)\n", "--no-raw", "mget", "k", "absent")
			says(t, "1\n", "del", "k")
		})
		t.Run("-e gives a status", func(t *testing.T) {
			out, err := output(t, "", "redis-cli", "-p", port, "-e", "get")
			equal(t, err != nil, true)
			equal(t, strings.TrimSpace(out), "ERR wrong number of arguments for 'get' command")
		})
		t.Run("commands from stdin", func(t *testing.T) {
			equal(t, cli(t, "set a 1\nincr a\nget a\n"), "OK\n2\n2\n")
			equal(t, cli(t, "multi\nset a 1\nincr a\nexec\n"), "OK\nQUEUED\nQUEUED\nOK\n2\n")
		})
		t.Run("interactive", func(t *testing.T) {
			// It reads COMMAND DOCS for its help.
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, "redis-cli", "-p", port)
			cmd.Env = append(cmd.Environ(), "TERM=xterm", "HOME="+t.TempDir())
			terminal, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
			must(t, err)
			defer terminal.Close()
			in := bufio.NewReader(terminal)
			waitFor := func(text string) {
				t.Helper()
				var shown strings.Builder
				for !strings.Contains(shown.String(), text) {
					b, err := in.ReadByte()
					if err != nil {
						t.Fatalf("waiting for %q after %q: %v", text, shown.String(), err)
					}
					shown.WriteByte(b)
				}
			}
			// It throws away input that is typed before there is a prompt.
			for _, step := range []struct{ wait, then, send string }{
				{"> ", "", "set a 1\r"}, {"OK\r\n", "> ", "get a\r"}, {"\"1\"\r\n", "> ", "help get\r"},
				{"the value of a key", "> ", "quit\r"},
			} {
				waitFor(step.wait)
				waitFor(step.then)
				_, err := terminal.WriteString(step.send)
				must(t, err)
			}
			_, _ = io.Copy(io.Discard, in) // EIO, as it has no other end any more
			must(t, cmd.Wait())
		})
		t.Run("-x and -X", func(t *testing.T) {
			equal(t, cli(t, "from stdin", "-x", "set", "k"), "OK\n")
			says(t, "from stdin\n", "get", "k")
			equal(t, cli(t, "named", "-X", "tag", "set", "k", "tag", "px", "100000"), "OK\n")
			says(t, "named\n", "get", "k")
		})
		t.Run("-r -i", func(t *testing.T) {
			says(t, "1\n2\n3\n", "-r", "3", "-i", "0.001", "incr", "repeated")
		})
		t.Run("-n", func(t *testing.T) {
			says(t, "OK\n", "-n", "1", "set", "elsewhere", "1")
			says(t, "0\n", "exists", "elsewhere")
			says(t, "1\n", "-n", "1", "exists", "elsewhere")
		})
		t.Run("-u", func(t *testing.T) {
			says(t, "1\n", "-u", "redis://"+at.redis+"/1", "exists", "elsewhere")
		})
		t.Run("-3", func(t *testing.T) {
			says(t, "OK\n", "-3", "set", "k", "v")
			says(t, "\"v\"\n", "-3", "--no-raw", "get", "k")
			says(t, "(nil)\n", "-3", "--no-raw", "get", "absent")
			contains(t, cli(t, "", "-3", "--no-raw", "hello"), `"proto" => (integer) 3`)
		})
		t.Run("--json --csv", func(t *testing.T) {
			says(t, "[\"v\",null]\n", "--json", "mget", "k", "absent")
			says(t, "\"v\",NULL\n", "--csv", "mget", "k", "absent")
		})
		t.Run("--quoted-input", func(t *testing.T) {
			says(t, "OK\n", "--quoted-input", "set", `"\x00\xff"`, `"\r\n"`)
			says(t, "\"\\r\\n\"\n", "--quoted-input", "--no-raw", "get", `"\x00\xff"`)
		})
		t.Run("--pipe", func(t *testing.T) {
			const n = 100_000
			var b strings.Builder
			for i := range n {
				k := "pipe:" + strconv.Itoa(i)
				fmt.Fprintf(&b, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$5\r\nvalue\r\n", len(k), k)
			}
			contains(t, cli(t, b.String(), "--pipe"), "errors: 0, replies: 100000")
			says(t, "value\n", "get", "pipe:99999")
		})
		t.Run("--scan --pattern", func(t *testing.T) {
			got := strings.Fields(cli(t, "", "--scan", "--pattern", "pipe:*"))
			seen := make(map[string]bool)
			for _, k := range got {
				seen[k] = true
			}
			equal(t, len(seen), 100_000)
			equal(t, len(strings.Fields(cli(t, "", "--scan", "--pattern", "pipe:4224[23]"))), 2)
		})
		t.Run("--bigkeys", func(t *testing.T) {
			says(t, "100000\n", "setrange", "big", "99999", "x")
			contains(t, cli(t, "", "--bigkeys"), `Biggest string found '"big"' has 100000 bytes`)
		})
		t.Run("--memkeys", func(t *testing.T) {
			contains(t, cli(t, "", "--memkeys"), `Biggest string found '"big"' has `)
		})
		t.Run("--hotkeys", func(t *testing.T) {
			if at.name == "reference" {
				says(t, "OK\n", "config", "set", "maxmemory-policy", "allkeys-lfu")
				defer says(t, "OK\n", "config", "set", "maxmemory-policy", "noeviction")
			}
			out, err := output(t, "", "redis-cli", "-p", port, "--hotkeys")
			// Either it works, or it says what it lacks, as a Redis does that counts nothing.
			if err != nil {
				contains(t, out, "An LFU maxmemory policy is not selected")
			} else {
				contains(t, out, "-- summary --")
			}
			t.Log(strings.TrimSpace(out[strings.LastIndex(strings.TrimSpace(out), "\n")+1:]))
		})
		t.Run("--stat", func(t *testing.T) {
			lines := firstLines(t, 4, "redis-cli", "-p", port, "-i", "0.05", "--stat")
			// keys, memory, clients, blocked, requests, connections
			row := strings.Fields(lines[3])
			keys, err := strconv.Atoi(row[0])
			must(t, err)
			equal(t, keys >= 100_000, true)
			equal(t, regexp.MustCompile(`^\d+\.\d\d[KMG]$`).MatchString(row[1]), true)
		})
		t.Run("--latency", func(t *testing.T) {
			// Without a terminal it measures for a second and prints min, max, avg, count.
			row := strings.Fields(cli(t, "", "--latency"))
			equal(t, len(row), 4)
		})
		t.Run("--latency-history", func(t *testing.T) {
			for i, row := range firstLines(t, 60, "stdbuf", "-oL", "redis-cli", "-p", port, "-i", "0.2",
				"--latency-history") {
				if strings.Contains(row, "seconds range") {
					break
				}
				equal(t, i < 59, true)
			}
		})
		t.Run("--latency-dist", func(t *testing.T) {
			contains(t, firstLines(t, 3, "redis-cli", "-p", port, "-i", "0.1", "--latency-dist")[0], "---")
		})
		t.Run("subscribe", func(t *testing.T) {
			for _, args := range [][]string{{"subscribe", "c", "d"}, {"-3", "psubscribe", "c*", "d*"}} {
				lines := firstLines(t, 6, append([]string{"stdbuf", "-oL", "redis-cli", "-p", port}, args...)...)
				contains(t, strings.Join(lines, " "), "subscribe")
				contains(t, lines[5], "2")
			}
		})
		t.Run("--eval", func(t *testing.T) {
			script := filepath.Join(t.TempDir(), "add.lua")
			must(t, os.WriteFile(script, []byte("return redis.call('INCRBY', KEYS[1], ARGV[1])"), 0o644))
			for i := 1; i < 3; i++ {
				equal(t, strings.TrimSpace(cli(t, "", "--eval", script, "evaluated", ",", "20")), strconv.Itoa(20*i))
			}
		})
		t.Run("--lru-test", func(t *testing.T) {
			row := firstLines(t, 1, "stdbuf", "-oL", "redis-cli", "-p", port, "-n", "2", "--lru-test", "1000")[0]
			contains(t, row, "Hits:")
		})
	})
	t.Run("monitor", func(t *testing.T) {
		l := open(t)
		equal(t, firstLines(t, 1, "stdbuf", "-oL", "redis-cli", "-p", portOf(l.ours().redis), "monitor")[0], "OK")
	})
	t.Run("what is not there", func(t *testing.T) {
		l := open(t)
		for _, args := range []string{"--replica", "--rdb " + filepath.Join(l.dir, "dump.rdb"), "--cluster check",
			"--functions-rdb " + filepath.Join(l.dir, "dump.rdb")} {
			t.Run(args, func(t *testing.T) {
				argv := append([]string{"redis-cli", "-e", "-p", portOf(l.ours().redis)}, strings.Fields(args)...)
				if strings.HasPrefix(args, "--cluster") {
					argv = []string{"redis-cli", "--cluster", "check", l.ours().redis}
				}
				out, err := output(t, "", argv...)
				if err == nil {
					t.Errorf("succeeds:\n%s", out)
				}
				if !regexp.MustCompile(`not support|unknown command|is disabled|cluster`).MatchString(out) {
					t.Errorf("does not say what is missing:\n%s", out)
				}
			})
		}
	})
	t.Run("unix socket", func(t *testing.T) {
		l := open(t)
		out, err := output(t, "", "redis-cli", "-s", filepath.Join(l.dir, "redis.sock"), "ping")
		must(t, err)
		equal(t, out, "PONG\n")
	})
	t.Run("kvd dev", func(t *testing.T) {
		l := open(t)
		for db := range 2 {
			out, err := output(t, "set k "+strconv.Itoa(db)+"\nget k\n", "redis-cli", "-p",
				portOf(l.dev.ready["redis"]), "-n", strconv.Itoa(db))
			must(t, err)
			equal(t, out, "OK\n"+strconv.Itoa(db)+"\n")
		}
		out, err := output(t, "", "memcping", "--servers", l.dev.ready["memcached"])
		if err != nil {
			t.Errorf("memcping: %v\n%s", err, out)
		}
	})
}

// TestRedisBenchmark runs redis-benchmark, which stops at an error reply, and shows
// what it measured; see docs/performance.md for numbers that mean something.
func TestRedisBenchmark(t *testing.T) {
	each(t, func(t *testing.T, at target) {
		for _, pipeline := range []int{1, 16, 64} {
			args := []string{"redis-benchmark", "-p", portOf(at.redis), "-t", "ping,set,get,incr,mset", "-r", "10000",
				"-d", "100",
				"-c", "50", "-P", strconv.Itoa(pipeline), "-n", strconv.Itoa(min(5000*pipeline, 100_000)), "--csv"}
			if pipeline == 16 {
				args = append(args, "--threads", "2")
			}
			t.Run("-P "+strconv.Itoa(pipeline), func(t *testing.T) {
				out, err := output(t, "", args...)
				if err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				for _, name := range []string{"PING_INLINE", "PING_MBULK", "SET", "GET", "INCR", "MSET (10 keys)"} {
					m := regexp.MustCompile(`(?m)^"` + regexp.QuoteMeta(name) + `","([0-9.]+)"`).FindStringSubmatch(out)
					if m == nil {
						t.Errorf("no row of %s:\n%s", name, out)
						continue
					}
					t.Logf("%-14s %10s/s", name, m[1])
				}
			})
		}
	})
}

// firstLines runs a program that goes on for ever, until it has printed n lines.
func firstLines(t *testing.T, n int, argv ...string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.WaitDelay = time.Second
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	var lines []string
	in := bufio.NewScanner(out)
	// A line that is printed over again ends in a carriage return.
	in.Split(func(data []byte, atEOF bool) (int, []byte, error) {
		if i := strings.IndexAny(string(data), "\r\n"); i >= 0 {
			return i + 1, data[:i], nil
		}
		return 0, nil, nil
	})
	for len(lines) < n && in.Scan() {
		if in.Text() != "" {
			lines = append(lines, in.Text())
		}
	}
	cancel()
	_ = cmd.Wait() // it was killed
	if len(lines) < n {
		t.Fatalf("%s: ended after %d lines: %q", strings.Join(argv, " "), len(lines), lines)
	}
	return lines
}

func contains(t *testing.T, s, part string) {
	t.Helper()
	if !strings.Contains(s, part) {
		t.Fatalf("no %q in:\n%s", part, s[:min(len(s), 4000)])
	}
}
