// Package luascript runs Lua scripts as Redis 7.0 does. It has Redis's sandbox, its libraries (cjson, cmsgpack,
// struct, bit), its conversions between replies and values, and its errors.
//
// It knows neither commands nor the store: redis.call asks the [Host] that the run was given. A script is compiled once
// to a [Program], which any number of connections run at a time. A [Pool] keeps interpreters, which are made for one
// script after the other. Every run is bounded by a time, by the memory that its values take, and by the depth of its
// calls. The time holds inside string.find and table.concat as well. A script that is over a limit ends with an error
// and cannot catch it.
//
// Start with [Compile] and [Pool.Run], or with [Pool.Load] and [Pool.Call] for libraries of functions. All exported
// functions may be called concurrently, unless they say otherwise. The language is github.com/yuin/gopher-lua's Lua
// 5.1. The functions with which a script could take more than it is given are written anew here. They follow the manual
// and the behaviour of Lua's own.
package luascript

import (
	"container/list"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/ast"
	"github.com/yuin/gopher-lua/parse"

	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/units"
)

// Program is a compiled script. It is never changed, but for Alone.
type Program struct {
	// SHA is the SHA-1 of the source, in lower-case hexadecimal digits.
	SHA string
	// NoWrites says that the first line has the flag no-writes.
	NoWrites bool
	// MayWrite says that the first line has flags, and not that one.
	MayWrite bool
	// Alone is its caller's: the script has needed more than can be done for several scripts together.
	Alone atomic.Bool

	proto *lua.FunctionProto
	size  int // bytes that the cache counts
}

// MaxSource bounds the bytes of a script's source.
const MaxSource = 1 << 20

// maxDepth bounds how deep expressions and blocks may be nested: the compiler calls itself for each.
const maxDepth = 1000

// maxFunctions bounds the functions of a source, each of which takes some KB while it is compiled.
const maxFunctions = 2000

// programOverhead is about how many bytes of memory a source takes for each of its bytes while it is compiled.
const programOverhead = 24

// SHA is the name of a script.
func SHA(source []byte) string {
	sum := sha1.Sum(source)
	return hex.EncodeToString(sum[:])
}

// Compile prepares a script. The error's text is the reply that Redis would give.
func Compile(source []byte) (*Program, error) {
	p := &Program{SHA: SHA(source)}
	body := string(source)
	if strings.HasPrefix(body, "#!") {
		line, rest, more := strings.Cut(body, "\n")
		if !more {
			return nil, errors.New("ERR Invalid script shebang")
		}
		if err := p.readShebang(line); err != nil {
			return nil, err
		}
		p.MayWrite = !p.NoWrites
		body = "\n" + rest // line numbers stay
	}
	var err error
	if p.proto, err = compileChunk(body, scriptChunk); err != nil {
		return nil, errors.New("ERR Error compiling script (new function): " + err.Error())
	}
	p.size = 256 + protoBytes(p.proto)
	return p, nil
}

// Flag reads the first line of a script alone: whether it has the flag no-writes. says is false if the script has no
// such line, or one that makes no sense.
func Flag(source []byte) (noWrites, says bool) {
	line, _, more := strings.Cut(string(source[:min(len(source), MaxSource)]), "\n")
	p := Program{}
	if !strings.HasPrefix(line, "#!") || !more || p.readShebang(line) != nil {
		return false, false
	}
	return p.NoWrites, true
}

// readShebang reads the first line of a script that begins with #!.
func (p *Program) readShebang(line string) error {
	words, ok := resp.SplitLine(nil, []byte(line))
	if !ok || len(words) == 0 {
		return errors.New("ERR Invalid engine in script shebang")
	}
	if string(words[0]) != "#!lua" {
		return errors.New("ERR Unexpected engine in script shebang: " + string(words[0]))
	}
	for _, w := range words[1:] {
		flags, is := strings.CutPrefix(string(w), "flags=")
		if !is {
			return errors.New("ERR Unknown lua shebang option: " + string(w))
		}
		if flags == "" {
			continue
		}
		for _, f := range strings.Split(flags, ",") {
			if !slices.Contains(flagNames, f) {
				return errors.New("ERR Unexpected flag in script shebang: " + f)
			}
			p.NoWrites = p.NoWrites || f == noWrites
		}
	}
	return nil
}

const noWrites = "no-writes"

// flagNames are what scripts and functions may have, in Redis's order. All but no-writes mean nothing here.
var flagNames = []string{noWrites, "allow-oom", "allow-stale", "no-cluster", "allow-cross-slot-keys"}

// compileChunk compiles a source whose name errors show. The parser and compiler may panic where a source makes no
// sense.
func compileChunk(source, name string) (proto *lua.FunctionProto, err error) {
	defer func() {
		if r := recover(); r != nil {
			proto, err = nil, fmt.Errorf("%s:1: %v", name, r)
		}
	}()
	if len(source) > MaxSource {
		return nil, fmt.Errorf("%s:1: script of more than %s", name, units.Bytes(MaxSource))
	}
	source, renamed, err := prepareSource(source, name)
	if err != nil {
		return nil, err
	}
	chunk, err := parse.Parse(strings.NewReader(source), name)
	if err != nil {
		text := parseMessage(name, err)
		if renamed != "" {
			text = strings.ReplaceAll(text, renamed, "goto")
		}
		return nil, errors.New(text)
	}
	r := rewriter{called: make(map[string]bool), renamed: renamed, lengths: mayHaveMetatables(source)}
	chunk = r.rewriteBlock(chunk)
	if r.functions > maxFunctions {
		return nil, fmt.Errorf("%s:1: script of more than %d functions", name, maxFunctions)
	}
	if r.tooDeep {
		return nil, fmt.Errorf("%s:1: chunk has too many syntax levels", name)
	}
	proto, err = lua.Compile(append(r.prelude(), chunk...), name)
	if err != nil {
		return nil, errors.New(parseMessage(name, err))
	}
	clipProto(proto)
	// nobody has asked for the table arg, which takes as long to make as a short script to run
	proto.IsVarArg &^= lua.VarArgNeedsArg
	return proto, nil
}

// clipProto gives up the room that the compiler has left in a function and those within it, which is most of what short
// ones take.
func clipProto(p *lua.FunctionProto) {
	p.Code, p.Constants, p.FunctionPrototypes = slices.Clone(p.Code), slices.Clone(p.Constants),
		slices.Clone(p.FunctionPrototypes)
	p.DbgSourcePositions, p.DbgLocals = slices.Clone(p.DbgSourcePositions), slices.Clone(p.DbgLocals)
	p.DbgCalls, p.DbgUpvalues = slices.Clone(p.DbgCalls), slices.Clone(p.DbgUpvalues)
	for _, inner := range p.FunctionPrototypes {
		clipProto(inner)
	}
}

// protoBytes is about what the code of a function and of those within it takes.
func protoBytes(p *lua.FunctionProto) int {
	n := 1024 + 12*len(p.Code) + 32*len(p.Constants) + 40*len(p.DbgCalls) + 64*len(p.DbgLocals) + 32*len(p.DbgUpvalues)
	for _, c := range p.Constants {
		if s, is := c.(lua.LString); is {
			n += len(s)
		}
	}
	for _, inner := range p.FunctionPrototypes {
		n += protoBytes(inner)
	}
	return n
}

var parserForm = regexp.MustCompile(`(?s)line:(\d+)\(column:\d+\) near '(.*?)':\s*(.*)`)

// parseMessage words an error of the parser as Lua does.
func parseMessage(name string, err error) string {
	s := strings.TrimSpace(err.Error())
	if m := parserForm.FindStringSubmatch(s); m != nil {
		return fmt.Sprintf("%s:%s: %s near '%s'", name, m[1], parserText(m[3]), m[2])
	}
	if _, rest, ok := strings.Cut(s, "at EOF:"); ok {
		return fmt.Sprintf("%s:%d: %s near '<eof>'", name, 1, parserText(rest))
	}
	return s
}

// parserText is what the parser complains of, in Lua's words if it has them.
func parserText(text string) string {
	text = strings.TrimSpace(text)
	switch text {
	case "syntax error":
		return "unexpected symbol"
	case "parse error": // an expression that is no call
		return "'=' expected"
	case "unterminated string":
		return "unfinished string"
	}
	return text
}

// The names that a compiled script calls these by cannot be written in a source.
const (
	hiddenConcat = "\x00concat"
	hiddenSet    = "\x00set"
	hiddenKey    = "\x00key"
	hiddenTable  = "\x00table"
	hiddenLength = "\x00length"
	hiddenModulo = "\x00modulo"
	hiddenNumber = "\x00number"
)

// hidden are all of them.
var hidden = []string{hiddenConcat, hiddenSet, hiddenKey, hiddenTable, hiddenLength, hiddenModulo, hiddenNumber}

// prelude makes those that are called locals of the chunk, whose functions then have them as upvalues.
func (r *rewriter) prelude() []ast.Stmt {
	s := &ast.LocalAssignStmt{}
	for _, n := range hidden {
		if !r.called[n] {
			continue
		}
		s.Names = append(s.Names, n)
		s.Exprs = append(s.Exprs, at(&ast.IdentExpr{Value: n}, 1))
	}
	if s.Names == nil {
		return nil
	}
	s.SetLine(1)
	s.SetLastLine(1)
	return []ast.Stmt{s}
}

// at puts an expression on a line.
func at[E ast.Expr](e E, line int) E {
	e.SetLine(line)
	e.SetLastLine(line)
	return e
}

// rewriter makes calls of those operations that may take much memory in one instruction, of which the interpreter tells
// nobody: joining strings, making tables, and setting an index far behind the others. It does the same with what the
// interpreter has otherwise than Lua 5.1: #, %, numbers, and the name goto.
type rewriter struct {
	depth     int
	tooDeep   bool
	functions int
	called    map[string]bool // of hidden
	renamed   string          // see prepareSource
	lengths   bool            // # may meet a metatable
}

// name is a name as the source has it.
func (r *rewriter) name(s string) string {
	if r.renamed != "" && s == r.renamed {
		return "goto"
	}
	return s
}

func (r *rewriter) rewriteNames(names []string) {
	for i, n := range names {
		names[i] = r.name(n)
	}
}

func (r *rewriter) rewriteParameters(f *ast.FunctionExpr) {
	if f.ParList != nil {
		r.rewriteNames(f.ParList.Names)
	}
}

// enterPart reports whether a part of the source may be looked at; leavePart is to be called then.
func (r *rewriter) enterPart() bool {
	r.depth++
	if r.depth > maxDepth {
		r.tooDeep = true
		r.depth--
		return false
	}
	return true
}

func (r *rewriter) leavePart() { r.depth-- }

func (r *rewriter) rewriteBlock(list []ast.Stmt) []ast.Stmt {
	if !r.enterPart() {
		return list
	}
	defer r.leavePart()
	for i := range list {
		list[i] = r.rewriteStmt(list[i])
	}
	return list
}

func (r *rewriter) rewriteAll(list []ast.Expr) {
	for i := range list {
		list[i] = r.rewriteExpr(list[i])
	}
}

func (r *rewriter) rewriteStmt(s ast.Stmt) ast.Stmt {
	switch s := s.(type) {
	case *ast.AssignStmt:
		return r.rewriteAssign(s)
	case *ast.LocalAssignStmt:
		r.rewriteNames(s.Names)
		r.rewriteAll(s.Exprs)
	case *ast.FuncCallStmt:
		s.Expr = r.rewriteExpr(s.Expr)
	case *ast.DoBlockStmt:
		s.Stmts = r.rewriteBlock(s.Stmts)
	case *ast.WhileStmt:
		s.Condition = r.rewriteExpr(s.Condition)
		s.Stmts = r.rewriteBlock(s.Stmts)
	case *ast.RepeatStmt:
		s.Condition = r.rewriteExpr(s.Condition)
		s.Stmts = r.rewriteBlock(s.Stmts)
	case *ast.IfStmt:
		s.Condition = r.rewriteExpr(s.Condition)
		s.Then = r.rewriteBlock(s.Then)
		s.Else = r.rewriteBlock(s.Else)
	case *ast.NumberForStmt:
		s.Name = r.name(s.Name)
		s.Init, s.Limit, s.Step = r.rewriteBound(s.Init), r.rewriteBound(s.Limit), r.rewriteBound(s.Step)
		s.Stmts = r.rewriteBlock(s.Stmts)
	case *ast.GenericForStmt:
		r.rewriteNames(s.Names)
		r.rewriteAll(s.Exprs)
		s.Stmts = r.rewriteBlock(s.Stmts)
	case *ast.FuncDefStmt:
		r.functions++
		s.Name.Method = r.name(s.Name.Method)
		r.rewriteParameters(s.Func)
		s.Name.Func = r.rewriteExpr(s.Name.Func)
		s.Name.Receiver = r.rewriteExpr(s.Name.Receiver)
		s.Func.Stmts = r.rewriteBlock(s.Func.Stmts)
	case *ast.ReturnStmt:
		r.rewriteAll(s.Exprs)
	}
	return s
}

// rewriteAssign makes t[k] = v a call, unless the key is a constant, or the next one (t[#t+1]). Of several assignments
// at once the keys alone are looked at, since a call would change their order.
func (r *rewriter) rewriteAssign(s *ast.AssignStmt) ast.Stmt {
	single := len(s.Lhs) == 1 && len(s.Rhs) == 1
	r.rewriteAll(s.Rhs)
	for i, l := range s.Lhs {
		g, is := l.(*ast.AttrGetExpr)
		if !is {
			continue
		}
		appends := isNext(g)
		g.Object, g.Key = r.rewriteExpr(g.Object), r.rewriteExpr(g.Key)
		if _, named := g.Key.(*ast.StringExpr); named || appends {
			continue
		}
		if single {
			call := &ast.FuncCallStmt{Expr: r.hiddenCall(hiddenSet, s.Line(), g.Object, g.Key, onlyValue(s.Rhs[0]))}
			call.SetLine(s.Line())
			call.SetLastLine(s.LastLine())
			return call
		}
		s.Lhs[i].(*ast.AttrGetExpr).Key = r.hiddenCall(hiddenKey, s.Line(), onlyValue(g.Key))
	}
	return s
}

// isNext reports whether an expression is t[#t+1].
func isNext(g *ast.AttrGetExpr) bool {
	sum, ok := g.Key.(*ast.ArithmeticOpExpr)
	if !ok || sum.Operator != "+" {
		return false
	}
	length, ok := sum.Lhs.(*ast.UnaryLenOpExpr)
	if !ok {
		return false
	}
	one, ok := sum.Rhs.(*ast.NumberExpr)
	if !ok || one.Value != "1" {
		return false
	}
	a, ok := length.Expr.(*ast.IdentExpr)
	b, ok2 := g.Object.(*ast.IdentExpr)
	return ok && ok2 && a.Value == b.Value
}

// onlyValue makes the first value of what may be several.
func onlyValue(e ast.Expr) ast.Expr {
	switch e := e.(type) {
	case *ast.FuncCallExpr:
		e.AdjustRet = true
	case *ast.Comma3Expr:
		e.AdjustRet = true
	}
	return e
}

// hiddenCall is a call of a function of the prelude, for its only value.
func (r *rewriter) hiddenCall(name string, line int, args ...ast.Expr) *ast.FuncCallExpr {
	r.called[name] = true
	return at(&ast.FuncCallExpr{Func: at(&ast.IdentExpr{Value: name}, line), Args: args, AdjustRet: true}, line)
}

func (r *rewriter) rewriteExpr(e ast.Expr) ast.Expr {
	if e == nil || !r.enterPart() {
		return e
	}
	defer r.leavePart()
	switch e := e.(type) {
	case *ast.IdentExpr:
		e.Value = r.name(e.Value)
	case *ast.StringExpr: // a field
		e.Value = r.name(e.Value)
	case *ast.NumberExpr:
		f, _ := parseNumber(e.Value)
		// in which the interpreter finds neither octal digits nor what is too large
		e.Value = strconv.FormatFloat(float64(f), 'g', -1, 64)
	case *ast.AttrGetExpr:
		e.Object, e.Key = r.rewriteExpr(e.Object), r.rewriteExpr(e.Key)
	case *ast.TableExpr:
		for _, f := range e.Fields {
			if f.Key != nil {
				f.Key = r.rewriteExpr(f.Key)
				if _, named := f.Key.(*ast.StringExpr); !named {
					f.Key = r.hiddenCall(hiddenKey, e.Line(), onlyValue(f.Key))
				}
			}
			f.Value = r.rewriteExpr(f.Value)
		}
		return r.hiddenCall(hiddenTable, e.Line(), e)
	case *ast.FuncCallExpr:
		e.Method = r.name(e.Method)
		e.Func, e.Receiver = r.rewriteExpr(e.Func), r.rewriteExpr(e.Receiver)
		r.rewriteAll(e.Args)
	case *ast.LogicalOpExpr:
		e.Lhs, e.Rhs = r.rewriteExpr(e.Lhs), r.rewriteExpr(e.Rhs)
	case *ast.RelationalOpExpr:
		e.Lhs, e.Rhs = r.rewriteExpr(e.Lhs), r.rewriteExpr(e.Rhs)
	case *ast.ArithmeticOpExpr:
		e.Lhs, e.Rhs = r.rewriteExpr(e.Lhs), r.rewriteExpr(e.Rhs)
		if e.Operator == "%" {
			return r.hiddenCall(hiddenModulo, e.Line(), onlyValue(e.Lhs), onlyValue(e.Rhs))
		}
	case *ast.UnaryMinusOpExpr:
		e.Expr = r.rewriteExpr(e.Expr)
	case *ast.UnaryNotOpExpr:
		e.Expr = r.rewriteExpr(e.Expr)
	case *ast.UnaryLenOpExpr:
		e.Expr = r.rewriteExpr(e.Expr)
		if r.lengths {
			return r.hiddenCall(hiddenLength, e.Line(), onlyValue(e.Expr))
		}
	case *ast.FunctionExpr:
		r.functions++
		r.rewriteParameters(e)
		e.Stmts = r.rewriteBlock(e.Stmts)
	case *ast.StringConcatOpExpr:
		return r.rewriteConcat(e)
	}
	return e
}

// rewriteBound is rewriteExpr for a number of a for, which may be a string.
func (r *rewriter) rewriteBound(e ast.Expr) ast.Expr {
	switch e = r.rewriteExpr(e); e.(type) {
	case nil, *ast.NumberExpr, *ast.UnaryLenOpExpr, *ast.ArithmeticOpExpr, *ast.UnaryMinusOpExpr:
		return e
	}
	return r.hiddenCall(hiddenNumber, e.Line(), onlyValue(e))
}

// rewriteConcat joins a chain in calls of up to maxJoined strings each, from the right as .. does.
func (r *rewriter) rewriteConcat(e *ast.StringConcatOpExpr) ast.Expr {
	const maxJoined = 32
	var parts []ast.Expr
	var rest ast.Expr = e
	for {
		c, is := rest.(*ast.StringConcatOpExpr)
		if !is {
			parts = append(parts, onlyValue(r.rewriteExpr(rest)))
			break
		}
		parts = append(parts, onlyValue(r.rewriteExpr(c.Lhs)))
		rest = c.Rhs
	}
	for len(parts) > maxJoined {
		n := len(parts) - maxJoined
		parts = append(parts[:n:n], r.hiddenCall(hiddenConcat, e.Line(), parts[n:]...))
	}
	return r.hiddenCall(hiddenConcat, e.Line(), parts...)
}

// Cache has the scripts that were used last, by their SHA. The zero value is not usable: see NewCache.
type Cache struct {
	mu struct {
		sync.Mutex
		bytes int
		all   map[string]*list.Element // of *Program
		order list.List                // the one used last is in front
	}
	front atomic.Pointer[Program] // of order, or nil; set with mu held
	limit int
}

// NewCache makes a Cache of that number of bytes. A short script takes some 2,000 of them. Any script fits if it is
// alone.
func NewCache(bytes int) *Cache {
	c := &Cache{limit: bytes}
	c.mu.all = make(map[string]*list.Element)
	return c
}

// Find is the script of that name, or nil. Digits may be in upper or lower case.
func (c *Cache) Find(sha []byte) *Program {
	if p := c.front.Load(); p != nil && p.SHA == string(sha) {
		return p // and stays in front
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.mu.all[string(sha)]
	if e == nil {
		if e = c.mu.all[strings.ToLower(string(sha))]; e == nil {
			return nil
		}
	}
	c.mu.order.MoveToFront(e)
	p := e.Value.(*Program)
	c.front.Store(p)
	return p
}

// Add keeps a script, and forgets others that have not been used for the longest time if there is no room.
func (c *Cache) Add(p *Program) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.all[p.SHA] != nil {
		return
	}
	c.mu.all[p.SHA] = c.mu.order.PushFront(p)
	c.front.Store(p)
	c.mu.bytes += p.size
	for c.mu.bytes > c.limit && c.mu.order.Len() > 1 {
		last := c.mu.order.Back()
		old := c.mu.order.Remove(last).(*Program)
		delete(c.mu.all, old.SHA)
		c.mu.bytes -= old.size
	}
}

// Clear forgets all scripts.
func (c *Cache) Clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.mu.all)
	c.mu.order.Init()
	c.front.Store(nil)
	c.mu.bytes = 0
}

// Len is how many scripts there are, and the bytes that they are counted with.
func (c *Cache) Len() (n, bytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.order.Len(), c.mu.bytes
}
