package nemesis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
)

// The bank: transfers between accounts, by transactions of all clients, while others read all accounts together or
// write one of them. The sum of the accounts never changes. Each transfer notes its number in its mover's journal, in
// the same transaction.
const (
	bankPrefix = "bank/"
	accounts   = 64
	each       = 1000 // in an account, when the bank opens
	kept       = 64   // numbers that a journal keeps
	movers     = 2    // of a client
)

func accountKey(i int) []byte { return fmt.Appendf(nil, "%saccount/%d", bankPrefix, i) }

// moverName is a mover: a client, its life, and which of its movers.
func moverName(client, life, n int) string { return fmt.Sprintf("%d.%d.%d", client, life, n) }

func journalKey(mover string) []byte { return []byte(bankPrefix + "journal/" + mover) }

// journal is what the transfers of a mover have done.
type journal struct {
	Last []int         // numbers of the last of them, in their order
	Net  [accounts]int // what they have moved to each account, all together
}

// noteTransfer adds a transfer.
func (j *journal) noteTransfer(n, from, to, amount int) {
	if j.Last = append(j.Last, n); len(j.Last) > kept {
		j.Last = j.Last[1:]
	}
	j.Net[from] -= amount
	j.Net[to] += amount
}

// outcomes are those of a mover's last transfers, by number.
type outcomes map[int]string

// noteOutcome adds a transfer's, and forgets those that no journal tells of any more.
func (o outcomes) noteOutcome(n int, out string) {
	o[n] = out
	delete(o, n-kept)
}

// judgeJournal compares a mover's journal with the outcomes that it was told.
func (o outcomes) judgeJournal(j journal) error {
	first := 0
	for i, n := range j.Last {
		switch {
		case i == 0:
			first = n
		case n <= j.Last[i-1]:
			return fmt.Errorf("transfers %v are noted, not each once", j.Last)
		}
		if o[n] == outNo {
			return fmt.Errorf("transfer %d is noted, and was answered: it did not happen", n)
		}
	}
	if len(j.Last) < kept {
		first = 0 // all are there
	}
	for n, out := range o {
		if out == outOK && n >= first && !slices.Contains(j.Last, n) {
			return fmt.Errorf("transfer %d was acknowledged, and is not among those noted: %v", n, j.Last)
		}
	}
	return nil
}

// bad tells that the store has done what it may not.
func (l *loader) bad(format string, a ...any) {
	l.print("bad", strconv.Quote(fmt.Sprintf("client %d: bank: %s", l.Client, fmt.Sprintf(format, a...))))
}

// bank works in the bank until SIGTERM.
func (l *loader) bank() {
	for {
		err := l.openBank()
		if err == nil {
			break
		}
		l.outcome("bank: open", err)
		if !l.rest(100 * time.Millisecond) {
			return
		}
	}
	var wg sync.WaitGroup
	for n := range movers {
		wg.Go(func() { l.move(n) })
	}
	wg.Go(l.sweep)
	wg.Go(l.rewrite)
	wg.Wait()
}

// openBank makes the accounts, if nobody has.
func (l *loader) openBank() error {
	return client.Txn(context.Background(), l.c, func(tx *client.Tx) error {
		n, _, err := balances(tx)
		if err != nil || n == accounts {
			return err
		}
		for i := range accounts {
			tx.Put(accountKey(i), strconv.AppendInt(nil, each, 10), client.PutOptions{})
		}
		return nil
	})
}

// balances reads all accounts: how many there are, and their sum.
func balances(tx *client.Tx) (n, sum int, err error) {
	var keys [][]byte
	for i := range accounts {
		keys = append(keys, accountKey(i))
	}
	if err := tx.Load(keys...); err != nil {
		return 0, 0, err
	}
	for _, k := range keys {
		b, err := balance(tx, k)
		switch {
		case errors.Is(err, client.ErrNotFound):
		case err != nil:
			return 0, 0, err
		default:
			n++
			sum += b
		}
	}
	return n, sum, nil
}

// errBalance: a value that nobody wrote.
var errBalance = errors.New("no balance")

func balance(tx *client.Tx, key []byte) (int, error) {
	it, err := tx.Get(key)
	if err != nil {
		return 0, err
	}
	b, err := strconv.Atoi(string(it.Value))
	if err != nil {
		return 0, fmt.Errorf("%w: %q holds %.80q", errBalance, key, it.Value)
	}
	return b, nil
}

// move transfers amounts, and compares its journal with what it was answered.
func (l *loader) move(mover int) {
	name := moverName(l.Client, l.Life, mover)
	rng := rand.New(rand.NewPCG(uint64(l.Client)<<32|uint64(l.Life), uint64(100+mover)))
	told := outcomes{}
	for n := 1; l.rest(time.Duration(rng.Int64N(int64(2*l.BankPace) + 1))); n++ {
		from, to, amount := rng.IntN(accounts), rng.IntN(accounts-1), 1+rng.IntN(9)
		if to >= from {
			to++
		}
		err := client.Txn(context.Background(), l.c, func(tx *client.Tx) error {
			return transfer(tx, name, n, from, to, amount, told)
		})
		if errors.Is(err, errJournal) || errors.Is(err, errBalance) || errors.Is(err, client.ErrNotFound) {
			l.bad("transfer %d of %s: %v", n, name, err)
			return
		}
		out, _ := l.outcome("bank: transfer", err)
		if out != outOK && out != outUnknown {
			out = outNo
		}
		told.noteOutcome(n, out)
		l.print("moved", name, n, out)
	}
}

// errJournal: a journal that contradicts what its mover was answered.
var errJournal = errors.New("the journal is wrong")

// transfer is what a transfer reads and writes. Nobody else writes the journal, so it is judged whatever becomes of the
// transaction.
func transfer(tx *client.Tx, mover string, n, from, to, amount int, told outcomes) error {
	book := journalKey(mover)
	if err := tx.Load(book, accountKey(from), accountKey(to)); err != nil {
		return err
	}
	var j journal
	it, err := tx.Get(book)
	if err == nil {
		err = json.Unmarshal(it.Value, &j)
	}
	if err != nil && !errors.Is(err, client.ErrNotFound) {
		return fmt.Errorf("journal: %w", err)
	}
	if err := told.judgeJournal(j); err != nil {
		return fmt.Errorf("%w: %w", errJournal, err)
	}
	for _, x := range []struct{ account, by int }{{from, -amount}, {to, amount}} {
		b, err := balance(tx, accountKey(x.account))
		if err != nil {
			return err
		}
		tx.Put(accountKey(x.account), strconv.AppendInt(nil, int64(b+x.by), 10), client.PutOptions{})
	}
	j.noteTransfer(n, from, to, amount)
	doc, err := json.Marshal(j)
	tx.Put(book, doc, client.PutOptions{})
	return err
}

// sweep reads all accounts together.
func (l *loader) sweep() {
	for l.rest(8 * l.BankPace) {
		n, sum := 0, 0
		err := client.Txn(context.Background(), l.c, func(tx *client.Tx) (err error) {
			n, sum, err = balances(tx)
			return err
		})
		switch {
		case errors.Is(err, errBalance):
			l.bad("%v", err)
		case err != nil:
			l.outcome("bank: sweep", err)
		case n != accounts || sum != accounts*each:
			l.bad("%d accounts hold %d together, want %d with %d", n, sum, accounts, accounts*each)
		default:
			l.print("swept")
		}
	}
}

// rewrite writes single accounts as they are.
func (l *loader) rewrite() {
	rng := rand.New(rand.NewPCG(uint64(l.Client)<<32|uint64(l.Life), 99))
	for l.rest(time.Duration(rng.Int64N(int64(2*l.BankPace) + 1))) {
		key := accountKey(rng.IntN(accounts))
		ops := []client.Op{
			{Kind: client.OpUpdate, Key: key, Update: func(cur client.Item, present bool) (client.Change, error) {
				if !present {
					return client.Change{}, errBalance
				}
				return client.Change{Value: cur.Value}, nil
			}}}
		if l.c.Do(context.Background(), ops); errors.Is(ops[0].Err, errBalance) {
			l.bad("%q is not there", key)
			return
		}
		l.outcome("bank: rewrite", ops[0].Err)
	}
}

// bankBook is what clients say of the bank.
type bankBook struct {
	mu     sync.Mutex
	told   map[string]outcomes // by mover
	counts map[string]int      // transfers by outcome
	sweeps int
}

// heard takes the fields of a line about a transfer.
func (b *bankBook) heard(f []string) error {
	if len(f) != 3 {
		return fmt.Errorf("a transfer with %d fields, want mover, number, outcome", len(f))
	}
	n, err := strconv.Atoi(f[1])
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.told == nil {
		b.told, b.counts = map[string]outcomes{}, map[string]int{}
	}
	if b.told[f[0]] == nil {
		b.told[f[0]] = outcomes{}
	}
	b.told[f[0]].noteOutcome(n, f[2])
	b.counts[f[2]]++
	return nil
}

func (b *bankBook) swept() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sweeps++
}

func (b *bankBook) summary() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	text := "bank      "
	for _, out := range slices.Sorted(maps.Keys(b.counts)) {
		text += fmt.Sprintf(" %s=%d", out, b.counts[out])
	}
	return fmt.Sprintf("%s transfers of %d movers, %d sweeps\n", text, len(b.told), b.sweeps)
}

// judgeBank compares all that the bank holds, by key, with what its movers were told, after the end of all of them.
func (b *bankBook) judgeBank(values map[string]string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var want [accounts]int
	journals := map[string]journal{}
	for key, value := range values {
		mover, ok := strings.CutPrefix(key, string(journalKey("")))
		if !ok {
			continue
		}
		var j journal
		if err := json.Unmarshal([]byte(value), &j); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		journals[mover] = j
		for i, n := range j.Net {
			want[i] += n
		}
	}
	for mover, told := range b.told {
		if err := told.judgeJournal(journals[mover]); err != nil {
			return fmt.Errorf("mover %s: %w", mover, err)
		}
	}
	for i, n := range want {
		if got := values[string(accountKey(i))]; got != strconv.Itoa(each+n) {
			return fmt.Errorf("account %d holds %q, want %d after the transfers in the journals", i, got, each+n)
		}
	}
	if b.counts[outOK] == 0 || b.sweeps == 0 {
		return fmt.Errorf("%d transfers were acknowledged, and %d sweeps made", b.counts[outOK], b.sweeps)
	}
	return nil
}

// audit reads all that the bank holds, and judges it.
func (h *harness) audit() error {
	out, err := h.kvctl("-o", "json", "scan", "--long", "--limit", "0", "--prefix", bankPrefix)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	values := map[string]string{}
	for line := range strings.Lines(out) {
		var kv struct{ Key, Value string }
		if err := json.Unmarshal([]byte(line), &kv); err != nil {
			return fmt.Errorf("kvctl scan: %q: %w", line, err)
		}
		values[kv.Key] = kv.Value
	}
	if err := h.bank.judgeBank(values); err != nil {
		return fmt.Errorf("bank: %w", err)
	}
	return nil
}

// The judge notices all that can go wrong with transfers.
func TestBankJudge(t *testing.T) {
	fresh := func() (*bankBook, map[string]string) {
		b := &bankBook{sweeps: 1}
		values := map[string]string{}
		var net [accounts]int
		for _, mover := range []string{"0.1.0", "1.1.0"} {
			var j journal
			for n := 1; n <= kept+10; n++ {
				out := []string{outOK, outNo, outUnknown}[n%3]
				if err := b.heard([]string{mover, strconv.Itoa(n), out}); err != nil {
					t.Fatal(err)
				}
				if out == outOK || out == outUnknown && n%2 == 0 {
					j.noteTransfer(n, n%accounts, (n+1)%accounts, n)
					net[n%accounts] -= n
					net[(n+1)%accounts] += n
				}
			}
			doc, err := json.Marshal(j)
			if err != nil {
				t.Fatal(err)
			}
			values[string(journalKey(mover))] = string(doc)
		}
		for i, n := range net {
			values[string(accountKey(i))] = strconv.Itoa(each + n)
		}
		return b, values
	}
	edit := func(values map[string]string, f func(*journal)) {
		var j journal
		if err := json.Unmarshal([]byte(values[string(journalKey("1.1.0"))]), &j); err != nil {
			t.Fatal(err)
		}
		f(&j)
		doc, _ := json.Marshal(j) // it came from JSON
		values[string(journalKey("1.1.0"))] = string(doc)
	}
	for name, x := range map[string]struct {
		harm func(*bankBook, map[string]string)
		bad  bool
	}{
		"all is well":                  {func(*bankBook, map[string]string) {}, false},
		"an outcome that nobody heard": {func(b *bankBook, _ map[string]string) { delete(b.told["1.1.0"], 3) }, false},
		"an acknowledged transfer is not noted": {func(_ *bankBook, v map[string]string) {
			edit(v, func(j *journal) { j.Last = slices.DeleteFunc(j.Last, func(n int) bool { return n == 72 }) })
		}, true},
		"a journal is lost": {func(_ *bankBook, v map[string]string) { delete(v, string(journalKey("1.1.0"))) }, true},
		"a transfer is noted twice": {func(_ *bankBook, v map[string]string) {
			edit(v, func(j *journal) { j.Last = append(j.Last, j.Last[len(j.Last)-1]) })
		}, true},
		"a refused transfer is noted": {func(b *bankBook, _ map[string]string) {
			b.told["1.1.0"][72] = outNo
		}, true},
		"an account has too much": {func(_ *bankBook, v map[string]string) {
			v[string(accountKey(5))] += "0"
		}, true},
		"an account is not there": {func(_ *bankBook, v map[string]string) {
			delete(v, string(accountKey(63)))
		}, true},
		"half of a transfer was done": {func(_ *bankBook, v map[string]string) {
			edit(v, func(j *journal) { j.Net[7]++ })
		}, true},
		"a journal cannot be read": {func(_ *bankBook, v map[string]string) {
			v[string(journalKey("0.1.0"))] = "{"
		}, true},
		"nobody has read all accounts": {func(b *bankBook, _ map[string]string) { b.sweeps = 0 }, true},
		"no transfer was acknowledged": {func(b *bankBook, _ map[string]string) { b.counts[outOK] = 0 }, true},
		"unknown transfers may be noted": {func(b *bankBook, _ map[string]string) {
			b.told["1.1.0"][72] = outUnknown
		}, false},
	} {
		b, values := fresh()
		x.harm(b, values)
		if err := b.judgeBank(values); (err != nil) != x.bad {
			t.Errorf("%s: %v", name, err)
		}
	}
}
