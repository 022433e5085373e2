package acl

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func testCatalog(t testing.TB) *Catalog {
	t.Helper()
	read, _ := ParseCategory("READ")
	write, _ := ParseCategory("write")
	admin, _ := ParseCategory("admin")
	c, err := NewCatalog([]Command{{"get", read}, {"set", write}, {"config", 0}, {"config|get", admin},
		{"config|set", admin}, {"select", 0}, {"auth", 0}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestLinesMakeTheSameUsers: a line, loaded, is the same line and gives the same rights, whatever rules led to
// it.
func TestLinesMakeTheSameUsers(t *testing.T) {
	c := testCatalog(t)
	rules := []string{"on", "off", "nopass", "resetpass", ">a", ">b", "~*", "~a*", "%R~b*", "%W~b*", "%W~c",
		"resetkeys", "&*", "&x", "resetchannels",
		"+@all", "-@all", "+get", "-get", "+set", "+config", "-config|set", "+config|get", "-config", "+select|0",
		"+select", "-select", "+@read", "-@read", "+@admin",
		"db=0", "db=1,63", "alldbs", "(~s +get)", "(db=2 %W~w &y +@all -config)", "clearselectors", "reset",
		"sanitize-payload"}
	rapid.Check(t, func(r *rapid.T) {
		users := NewUsers(c, "")
		for _, rule := range rapid.SliceOfN(rapid.SampledFrom(rules), 0, 12).Draw(r, "rules") {
			_ = users.Set("u", []string{rule}) // some will not do after others
		}
		if users.Find("u") == nil {
			return
		}
		before := users.Find("u").Rights()
		again := NewUsers(c, "")
		if err := again.Load("f", []byte(strings.Join(users.Lines(), "\n"))); err != nil {
			r.Fatalf("%q: %v", users.Lines(), err)
		}
		if a, b := users.Lines(), again.Lines(); !slices.Equal(a, b) {
			r.Fatalf("%q was saved, and loaded %q", a, b)
		}
		after := again.Find("u").Rights()
		for i := range c.commands {
			for _, key := range []string{"a", "b", "c", "s", "w", "z"} {
				for _, db := range []int{0, 1, 2, 63} {
					for _, need := range []Need{0, NeedRead, NeedWrite, needAll} {
						a := Access{Command: i, Args: [][]byte{[]byte("x"), []byte(key)}, First: 1, Last: 1, Step: 1,
							Needs: need, Databases: DB(db)}
						x, _ := before.Check(&a)
						if y, _ := after.Check(&a); x != y {
							r.Fatalf("%s on %s in %d for %d: %v before, %v after %q", c.commands[i].Name, key, db, need,
								x, y, users.Lines())
						}
					}
				}
			}
		}
		for _, password := range []string{"a", "b", "c"} {
			_, x := users.Authenticate([]byte("u"), []byte(password))
			if _, y := again.Authenticate([]byte("u"), []byte(password)); x != y {
				r.Fatalf("password %s: %v before, %v after", password, x, y)
			}
		}
	})
}

// TestSetIsAllOrNothing: rights that are in use do not change beneath their users.
func TestSetIsAllOrNothing(t *testing.T) {
	users := NewUsers(testCatalog(t), "")
	if err := users.Set("u", []string{"on", "+get", "+select|0", "~a", "(~b +set)"}); err != nil {
		t.Fatal(err)
	}
	u := users.Find("u")
	before, line := u.Rights(), u.Rights().Line("u")
	if err := users.Set("u", []string{"+set", "+select|1", "~c", "(~d +set)", "nonsense"}); err == nil ||
		u.Rights() != before {
		t.Errorf("%v, %s", err, u.Rights().Line("u"))
	}
	if err := users.Set("u", []string{"+set", "+select|1", "~c", "clearselectors", ">p"}); err != nil ||
		before.Line("u") != line || u.Rights() == before {
		t.Errorf("%v, %s", err, before.Line("u"))
	}
}

// TestDatabasesBeyondRules: a database that no rule can name is for those who may use all.
func TestDatabasesBeyondRules(t *testing.T) {
	users := NewUsers(testCatalog(t), "")
	if err := users.Set("u", []string{"on", "nopass", "+@all", "~*", "db=63"}); err != nil {
		t.Fatal(err)
	}
	r := users.Find("u").Rights()
	for _, x := range []struct {
		a    Access
		want Denial
	}{
		{Access{Databases: DB(63)}, Allowed}, {Access{Databases: DB(63) | DB(0)}, DeniedDatabase}, {Access{}, Allowed},
		{Access{Databases: DB(64), AllDatabases: true}, DeniedDatabase},
	} {
		if got, _ := r.Check(&x.a); got != x.want {
			t.Errorf("%+v: %v, want %v", x.a, got, x.want)
		}
	}
	if r := users.Default().Rights(); !r.Unlimited() {
		t.Error("the default user is limited")
	}
}

// TestAuthenticate: every password of a user is good, and those of others are not.
func TestAuthenticate(t *testing.T) {
	users := NewUsers(testCatalog(t), "top")
	for name, rules := range map[string][]string{"a": {"on", ">1", ">2"}, "off": {">1"}, "open": {"on", "nopass"},
		"none": {"on"}} {
		if err := users.Set(name, rules); err != nil {
			t.Fatal(err)
		}
	}
	for _, x := range []struct {
		name, password string
		want           bool
	}{
		{"default", "top", true}, {"default", "", false}, {"a", "1", true}, {"a", "2", true}, {"a", "3", false},
		{"a", "", false}, {"off", "1", false},
		{"open", "x", true}, {"none", "", false}, {"nobody", "", false}, {"", "", false},
	} {
		u, ok := users.Authenticate([]byte(x.name), []byte(x.password))
		if ok != x.want || ok && u.Name != x.name {
			t.Errorf("%s with %q: %v", x.name, x.password, ok)
		}
	}
}

// TestLog: what is alike is one entry for a minute, the newest comes first, and what strangers fill it with is
// bounded.
func TestLog(t *testing.T) {
	var l Log
	now := time.Now()
	event := func(object, client string) Event {
		return Event{Why: DeniedKey, Context: "toplevel", Object: object, User: "u", Client: client}
	}
	l.Add(event("a", "1"), now)
	l.Add(event("b", "1"), now)
	l.Add(event("a", "2"), now.Add(time.Second))
	got := l.Newest(10)
	if len(got) != 2 || got[0].Object != "a" || got[0].Count != 2 || got[0].Client != "2" || got[1].Object != "b" {
		t.Errorf("%+v", got)
	}
	l.Add(event("a", "2"), now.Add(2*time.Minute))
	if got = l.Newest(1); got[0].Count != 1 || len(l.Newest(10)) != 3 {
		t.Errorf("%+v", got)
	}
	for i := range 1000 {
		l.Add(event(strings.Repeat("x", i), "1"), now)
	}
	if got = l.Newest(1 << 20); len(got) != MaxEntries || len(got[0].Object) != maxLogged {
		t.Errorf("%d entries, objects of %d bytes", len(got), len(got[0].Object))
	}
	if l.Reset(); len(l.Newest(10)) != 0 {
		t.Error("it was reset")
	}
}

// TestConcurrent is for the race detector: users change while connections use them.
func TestConcurrent(t *testing.T) {
	users := NewUsers(testCatalog(t), "")
	var wg sync.WaitGroup
	for i := range 4 {
		name := fmt.Sprint("u", i%2)
		wg.Go(func() {
			for j := range 300 {
				switch j % 3 {
				case 0:
					_ = users.Set(name, []string{"on", ">p", "+get", "+select|" + fmt.Sprint(j), "~a*"})
				case 1:
					users.Delete(name)
				case 2:
					_ = users.Load("f", []byte(strings.Join(users.Lines(), "\n")))
				}
			}
		})
		wg.Go(func() {
			for range 300 {
				if u, ok := users.Authenticate([]byte(name), []byte("p")); ok {
					u.Rights().Check(&Access{Args: [][]byte{[]byte("get"), []byte("a")}, First: 1, Last: 1, Step: 1})
				}
			}
		})
	}
	wg.Wait()
}

// FuzzLoad: whatever a file holds is loaded, and then the same when it is saved and loaded again, or refused.
func FuzzLoad(f *testing.F) {
	f.Add("user default on nopass ~* &* +@all\nuser a on >p (~x +get) db=1,2 %R~y")
	f.Add("user a (\nuser b )\nuser c () (+get\nuser")
	c := testCatalog(f)
	f.Fuzz(func(t *testing.T, text string) {
		users := NewUsers(c, "")
		if users.Load("f", []byte(text)) != nil {
			return
		}
		lines := users.Lines()
		if err := users.Load("f", []byte(strings.Join(lines, "\n"))); err != nil {
			t.Fatalf("%q: %v", lines, err)
		}
		if again := users.Lines(); !slices.Equal(lines, again) {
			t.Fatalf("%q, then %q", lines, again)
		}
	})
}

// TestSetPassword: another password is that of the default user, unless a file or SETUSER has given that other rights.
func TestSetPassword(t *testing.T) {
	good := func(u *Users, password string) bool {
		_, ok := u.Authenticate([]byte(DefaultUser), []byte(password))
		return ok
	}
	users := NewUsers(testCatalog(t), "1")
	for _, step := range []struct {
		name   string
		do     func() error
		stay   string
		others []string
	}{
		{"at first", func() error { return nil }, "1", []string{"2", ""}},
		{"another password", func() error { users.SetPassword("2"); return nil }, "2", []string{"1", ""}},
		{"a file without the user", func() error {
			return users.Load("f", []byte("user a on nopass\n"))
		}, "2", []string{"1", ""}},
		{"another password after a file", func() error { users.SetPassword("3"); return nil }, "3", []string{"2", ""}},
		{"a file with the user", func() error {
			return users.Load("f", []byte("user default on >own\n"))
		}, "own", []string{"3"}},
		{"another password beside that", func() error {
			users.SetPassword("4")
			return nil
		}, "own", []string{"3", "4"}},
		{"a file without the user again", func() error { return users.Load("f", nil) }, "4", []string{"own", "3"}},
		{"SETUSER", func() error { return users.Set(DefaultUser, []string{">5"}) }, "5", []string{"3"}},
		{"another password after SETUSER", func() error { users.SetPassword("6"); return nil }, "5", []string{"6"}},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		if !good(users, step.stay) {
			t.Errorf("%s: %q is not the password", step.name, step.stay)
		}
		for _, x := range step.others {
			if good(users, x) {
				t.Errorf("%s: %q is a password", step.name, x)
			}
		}
	}
}
