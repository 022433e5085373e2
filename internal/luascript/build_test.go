package luascript

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/livepeak"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// shared is a host of many scripts, which have one budget.
type shared struct {
	host
	used  *atomic.Int64
	total int64
	own   int64
}

func (h *shared) Reserve(n int64) error {
	if h.used.Add(n) > h.total {
		h.used.Add(-n)
		return errors.New("none left")
	}
	h.own += n
	return nil
}

// builders are scripts that make long values of short ones, each in a way of its own. MB is how many bytes.
var builders = map[string]string{
	"rep":               `return #string.rep('x', MB * 3)`,
	"rep of much":       `return #string.rep(string.rep('x', MB), 3)`,
	"many temporaries":  `return #string.format('%s%s%s%s', string.rep('a', MB), string.rep('b', MB), string.rep('c', MB), string.rep('d', MB))`,
	"format %q":         `return #string.format('%q', string.rep('x', MB))`,
	"format %q escaped": `return #string.format('%q', string.rep('\0', MB))`,
	"format %s":         `return #string.format('%s', string.rep('x', MB))`,
	"format %99s":       `return #string.format('%-99s', string.rep('x', MB))`,
	"format many":       `local t = {} local s = string.rep('x', MB / 8) for i = 1, 40 do t[i] = s end return #string.format(string.rep('%s', 40), unpack(t))`,
	"format widths":     `return #string.format(string.rep('%99d', 2000), unpack((function() local t = {} for i = 1, 2000 do t[i] = i end return t end)()))`,
	"format literal":    `return #string.format(string.rep('x', MB)..'%d', 1)`,
	"upper":             `return #string.upper(string.rep('x', MB))`,
	"lower":             `return #string.lower(string.rep('X', MB))`,
	"reverse":           `return #string.reverse(string.rep('x', MB))`,
	"sub":               `local s = string.rep('x', MB) local t = {} for i = 1, 20 do t[i] = s:sub(i) end return #t`,
	"bytes of many":     `local t = {} for i = 1, 30 do t[i] = string.rep('x', MB):sub(i, i) end return #t`,
	"matches of many":   `local t = {} for i = 1, 30 do t[i] = string.rep('x', MB):match('x') end return #t`,
	"captures of many":  `local t = {} for i = 1, 30 do t[i] = select(3, string.rep('x', MB):find('(x)')) end return #t`,
	"iterators of many": `local t = {} for i = 1, 30 do t[i] = string.gmatch(string.rep('x', MB), 'x') end return #t`,
	"unpacked of many":  `local t = {} for i = 1, 30 do t[i] = struct.unpack('c1', string.rep('x', MB)) end return #t`,
	"texts of many":     `local t = {} for i = 1, 30 do t[i] = select(2, cmsgpack.unpack_limit('\165hello'..string.rep('\0', MB), 1)) end return #t`,
	"concat":            `local s = string.rep('x', MB) return #(s .. s .. s .. s)`,
	"concat grows":      `local s = 'x' while #s < 4 * MB do s = s .. s end return #s`,
	"concat meta":       `local s = string.rep('x', MB) local m = setmetatable({}, {__concat = function(a, b) return s end}) return #(s .. (s .. m))`,
	"table.concat":      `local s = string.rep('x', MB / 8) local t = {} for i = 1, 40 do t[i] = s end return #table.concat(t)`,
	"table.concat sep":  `local t = {} for i = 1, 40 do t[i] = 'x' end return #table.concat(t, string.rep('y', MB / 8))`,
	"gsub":              `return #string.gsub(string.rep('x', MB), 'x', 'yyyy')`,
	"gsub of one":       `return #string.gsub('x', 'x', string.rep('y', MB * 2))`,
	"gsub %0":           `return #string.gsub(string.rep('x', MB), '.*', '%0%0%0%0')`,
	"gsub table":        `return #string.gsub(string.rep('x', 100), 'x', {x = string.rep('y', MB / 16)})`,
	"gsub function":     `local s = string.rep('y', MB / 16) return #string.gsub(string.rep('x', 100), 'x', function() return s end)`,
	"gsub nothing":      `return #string.gsub(string.rep('x', MB), 'z', '')`,
	"cjson.encode":      `return #cjson.encode(string.rep('x', MB))`,
	"cjson escaped":     `return #cjson.encode(string.rep('\1', MB))`,
	"cjson of many":     `local s = string.rep('x', MB / 8) local t = {} for i = 1, 40 do t[i] = s end return #cjson.encode(t)`,
	"cjson of keys":     `return #cjson.encode({[string.rep('"', MB)] = 1})`,
	"cjson nested":      `local t = {string.rep('x', MB / 100)} for i = 1, 12 do t = {t, t} end return #cjson.encode(t)`,
	"cjson.decode":      `return #cjson.decode('"'..string.rep('x', MB)..'"')`,
	"cjson.decode \\u":  `return #cjson.decode('"'..string.rep('\\u0041', MB / 6)..'"')`,
	"cjson.decode many": `return #cjson.decode('['..string.rep('[],', MB / 30)..'1]')`,
	"cmsgpack.pack":     `local s = string.rep('x', MB) return #cmsgpack.pack(s, s, s)`,
	"cmsgpack nested":   `local t = {string.rep('x', MB / 100)} for i = 1, 12 do t = {t, t} end return #cmsgpack.pack(t)`,
	"cmsgpack.unpack":   `local s = cmsgpack.pack(string.rep('x', MB)) local t = {} for i = 1, 20 do t[i] = cmsgpack.unpack(s) end return #t`,
	"cmsgpack arrays":   `return #cmsgpack.unpack('\221\127\255\255\255'..string.rep('\192', MB))`,
	"struct.pack":       `local s = string.rep('x', MB) return #struct.pack('sss', s, s, s)`,
	"struct.pack x":     `return #struct.pack(string.rep('x', MB))`,
	"struct.unpack":     `local t = {} local s = string.rep('x', MB) for i = 1, 20 do t[i] = struct.unpack('c'..(MB - i), s) end return #t`,
	"bit.tohex":         `local t = {} for i = 1, 10000 do t[i] = bit.tohex(i) end return #t`,
	"redis.call":        `local s = string.rep('x', MB) local t = {} for i = 1, 20 do t[i] = redis.call('echo', s) end return #t`,
	"redis.sha1hex":     `return redis.sha1hex(string.rep('x', MB))`,
	"redis.log":         `redis.log(3, string.rep('x', MB), string.rep('x', MB))`,
	"error_reply":       `return #redis.error_reply(string.rep('x', MB)).err`,
	"error":             `local ok, e = pcall(error, string.rep('x', MB)) return #e`,
	"assert":            `local ok, e = pcall(assert, false, string.rep('x', MB)) return #e`,
	"global":            `local ok, e = pcall(function() return _G[string.rep('x', MB)] end) return #e`,
	"returned":          `return string.rep('x', MB)`,
	"returned often":    `local s = string.rep('x', MB / 8) local t = {} for i = 1, 40 do t[i] = s end return t`,
	"returned error":    `return {err = string.rep('x', MB)}`,
	"returned big":      `return {big_number = string.rep('1', MB)}`,
	"load":              `return #tostring(loadstring('return "'..string.rep('x', MB / 8)..'"')())`,
	"load of parts":     `local n = 0 local s = string.rep(' ', MB / 8) return tostring(load(function() n = n + 1 if n < 40 then return s end end))`,
	"tostring":          `return #tostring(string.rep('x', MB))`,
	"sort":              `local t = {} for i = 1, 100 do t[i] = string.rep('x', 1000)..i end table.sort(t) return #t`,
	"char":              `local t = {} for i = 1, 7000 do t[i] = 65 end local u = {} for i = 1, 100 do u[i] = string.char(unpack(t)) end return #u`,
	"coroutine":         `return #coroutine.wrap(function() return string.format('%q', string.rep('\0', MB)) end)()`,
}

// TestBuildersTogether has many scripts at once make what is long, in every way that there is: all of them together
// have little more in use than they may.
func TestBuildersTogether(t *testing.T) {
	const scripts, memory, budget = 8, 32 << 20, 64 << 20
	for name, source := range builders {
		for _, bytes := range [...]int{3 << 20, 20 << 20} {
			if bytes > 3<<20 && !strings.Contains(source, "MB") {
				continue
			}
			source := strings.ReplaceAll(source, "MB", fmt.Sprint(bytes))
			prog, err := Compile([]byte(source))
			if err != nil {
				t.Fatal(name, err)
			}
			var used atomic.Int64
			most := livepeak.Watch(true)
			var wg sync.WaitGroup
			for range scripts {
				wg.Go(func() {
					h := &shared{used: &used, total: budget}
					task := &Task{Host: h, Memory: memory}
					task.Start(time.Minute)
					defer task.End()
					w := resp.Writer{Proto: 2}
					testPool.Run(task, prog, nil, nil, &w)
					if got := w.Bytes(); got[0] == '-' && !strings.Contains(string(got[:min(len(got), 200)]),
						stopTexts[outOfMemory]) && name != "returned error" {
						t.Errorf("%s of %d MiB: %.200s", name, bytes>>20, got)
					}
					used.Add(-h.own)
				})
			}
			wg.Wait()
			// The scripts go on while the collector runs.
			if top := most(); top > 6*budget {
				t.Errorf("%s of %d MiB: %d scripts take %d MiB, and may take %d", name, bytes>>20, scripts, top>>20,
					budget>>20)
			}
		}
	}
}

// TestTimeLimitWithin: functions of Go that work on what is long end soon after the time is over.
func TestTimeLimitWithin(t *testing.T) {
	const limit = 50 * time.Millisecond
	for name, source := range map[string]string{
		"sort numbers":      `local t = {} for i = 1, 200000 do t[i] = (i * 7919) % 200003 end while true do table.sort(t) table.sort(t, rawequal) end`,
		"sort strings":      `local t = {} for i = 1, 100 do t[i] = string.rep('x', 200000)..i end while true do table.sort(t) end`,
		"long set":          `return string.find(string.rep('b', 1000000), '['..string.rep('a', 5000000)..']*c')`,
		"long set of few":   `return string.find(string.rep('b', 1000), '['..string.rep('a', 10000000)..']')`,
		"back reference":    `return string.find(string.rep('a', 4000000), '(a*)%1b')`,
		"balance":           `local s = string.rep('(', 1000000) return string.find(s, '%b()')`,
		"frontier":          `return string.find(string.rep('a', 100000), '%f['..string.rep('b', 1000000)..']x')`,
		"gsub repeated":     `local s = string.rep('%1', 1000000) return #string.gsub(string.rep('a', 1000000), '(a)', s)`,
		"reps":              `while true do string.rep('x', 8000000) end`,
		"finds":             `local s = string.rep('x', 8000000) while true do s:find('xy', 1, true) end`,
		"upper":             `local s = string.rep('x', 8000000) while true do s:upper() end`,
		"format":            `local s = string.rep('x', 8000000) while true do string.format('%q%s', s, s) end`,
		"cjson.encode":      `local s = string.rep('\1', 3000000) while true do cjson.encode(s) end`,
		"cjson.decode":      `local s = '"'..string.rep('\\n', 3000000)..'"' while true do cjson.decode(s) end`,
		"cjson nested":      `local t = {} for i = 1, 900 do t = {t} end while true do cjson.decode(cjson.encode(t)) end`,
		"cmsgpack nested":   `local t = {} for i = 1, 15 do t = {t, t, t, t, t, t, t, t} end return #cmsgpack.pack(t)`,
		"struct":            `local f = string.rep('x', 5000000) while true do struct.pack(f) struct.size(f) end`,
		"sha1":              `local s = string.rep('x', 8000000) while true do redis.sha1hex(s) end`,
		"table.concat":      `local t = {} for i = 1, 100 do t[i] = string.rep('x', 100000) end while true do table.concat(t) end`,
		"table.insert":      `local t = {} for i = 1, 1e9 do table.insert(t, 1, i % 10) if #t > 100000 then t = {} end end`,
		"maxn":              `local t = {} for i = 1, 200000 do t[i] = i end while true do table.maxn(t) end`,
		"tonumber":          `local s = string.rep('1', 5000000) while true do tonumber(s) end`,
		"echo":              `local s = string.rep('x', 5000000) while true do redis.call('echo', s) end`,
		"returned nested":   `local t = {} for i = 1, 30 do t = {t, t} end return t`,
		"__index of itself": `local t = setmetatable({}, {}) getmetatable(t).__index = function(_, k) return t[k + 1] end return t[1]`,
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			got := perform(t, &host{}, source, 64<<20, limit)
			if took := time.Since(began); took > limit+5*time.Second {
				t.Errorf("ended after %v: %.100s", took, got)
			}
			if name != "__index of itself" && !strings.Contains(got, stopTexts[outOfTime]) &&
				!strings.Contains(got, stopTexts[outOfMemory]) {
				t.Errorf("%.200s", got)
			}
		})
	}
}
