package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
)

// simulated is the state of a store of so many memory nodes and placement groups, with two copies of each.
func simulated(nodes, groups int) *dirpb.StatusReply {
	const units = 1 << 20
	m := &dirpb.Map{
		Namespaces: []*dirpb.Namespace{{Id: 1, Name: "orders", Mode: dirpb.NamespaceMode_NAMESPACE_STORE, Replicas: 2,
			Owner: "group:shop",
			Quota: &dirpb.Quota{Sessions: 100}, Access: []*dirpb.Access{
				{Who: "group:reports", Right: dirpb.Right_RIGHT_READ}}}}}
	st := &dirpb.StatusReply{
		Map: m, AnsweredBy: "d1", Leads: true,
		Directory: []*dirpb.DirectoryNode{{Id: "d1", GrpcAddr: "d1:7400", Leader: true, Voter: true},
			{Id: "d2", GrpcAddr: "d2:7400", Voter: true}, {Id: "d3", GrpcAddr: "d3:7400", Voter: true}},
		Sessions: []*dirpb.SessionInfo{
			{Id: 7, Client: "shop-1", Namespace: "orders", Life: dirpb.SessionLife_SESSION_LIVE, AgeMillis: 3600_000,
				Identity: "spiffe://example/kvd/client/shop"}},
	}
	for i := range nodes {
		m.Nodes = append(m.Nodes, &dirpb.Node{Id: uint32(i + 1), Name: fmt.Sprint("m", i+1),
			State: dirpb.NodeState_NODE_UP, CapacityBytes: uint64(groups) * 80 * units * 3 / uint64(nodes),
			Domain:    fmt.Sprint("rack", i%3),
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: fmt.Sprintf("10.0.0.%d:7410", i+1)}}})
	}
	depth := 0
	for 1<<depth < groups {
		depth++
	}
	for i := range groups {
		g := &dirpb.PlacementGroup{Id: uint32(i + 1), NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE,
			RegionBytes: 80 * units, IndexBytes: 16 * units}
		for c := range 2 {
			n := m.Nodes[(i+c)%nodes]
			n.UsedBytes += g.RegionBytes
			g.Members = append(g.Members, &dirpb.Member{NodeId: n.Id})
		}
		m.Pgs = append(m.Pgs, g)
		live := uint64(units * (20 + i*7%60) / 100)
		st.Usage = append(st.Usage, &dirpb.PGUsage{PgId: g.Id, HeapUnits: units, GrantedUnits: live + units/8,
			LiveUnits: live, FreeUnits: units / 16, LimboUnits: units / 64, ComingUnits: units / 32,
			LostUnits:    units / 64,
			WaitingUnits: units / 50, Estimated: true})
	}
	for i := range 1 << depth {
		m.Shards = append(m.Shards, &dirpb.Shard{Id: uint32(i + 1), NamespaceId: 1, Prefix: uint32(i),
			Depth: uint32(depth), PgId: uint32(i%groups + 1)})
	}
	return st
}

// simulations are what the page is shown with.
func simulations() map[string]*dirpb.StatusReply {
	lose := func(st *dirpb.StatusReply, node uint32) {
		st.Map.Nodes[node-1].State = dirpb.NodeState_NODE_DOWN
		for _, g := range st.Map.Pgs {
			if i := slices.IndexFunc(g.Members, func(x *dirpb.Member) bool { return x.NodeId == node }); i >= 0 {
				g.Members = slices.Delete(g.Members, i, i+1)
				st.Jobs = append(st.Jobs, &dirpb.Job{Id: g.Id, Kind: dirpb.JobKind_JOB_JOIN, PgId: g.Id,
					Done: uint64(g.Id) * 100, Total: 1200, Owner: 3, Reason: "a copy is missing"})
			}
		}
	}
	down := simulated(5, 12)
	lose(down, 2)
	lost := simulated(4, 8)
	lose(lost, 3)
	lost.Map.Pgs[2].State, lost.Map.Pgs[2].Members = dirpb.PGState_PG_LOST, nil
	lost.Map.Namespaces[0].Losses = []*dirpb.Loss{{PgId: 3, Times: 1, Node: "m3", UnixMillis: 1_700_000_000_000}}
	busy := simulated(8, 16)
	for i, s := range busy.Map.Shards {
		if i%3 == 0 {
			s.Move = &dirpb.Move{ChildId: uint32(100 + i), PgId: uint32(i%16 + 1), Split: i%2 == 0}
			busy.Jobs = append(busy.Jobs, &dirpb.Job{Id: uint32(i + 1), Kind: dirpb.JobKind_JOB_MOVE, PgId: s.PgId,
				Done: uint64(i), Total: 16, Reason: "the shard is full"})
		}
	}
	return map[string]*dirpb.StatusReply{"healthy": simulated(5, 12), "degraded": down, "lost": lost, "busy": busy}
}

const odd = `<script>document.title="owned"</script><img src=x onerror="document.title='owned'">`

// oddState has HTML in each name that somebody else chooses, or might.
func oddState() *dirpb.StatusReply {
	st := simulations()["busy"]
	st.Sessions[0].Client, st.Sessions[0].Identity = odd+"client", odd+"identity"
	st.Map.Nodes[0].Name, st.Map.Nodes[0].Domain, st.Map.Nodes[0].Trouble = odd+"node", odd+"domain", odd+"trouble"
	st.Map.Namespaces[0].Name, st.Map.Namespaces[0].Owner, st.Map.Namespaces[0].Access[0].Who = odd+"namespace",
		odd+"owner", odd+"who"
	st.Jobs[0].Trouble, st.Jobs[0].Reason, st.Directory[1].Id = odd+"job", odd+"reason", odd+"member"
	return st
}

func servePage(t *testing.T, st *dirpb.StatusReply) *httpd.Server {
	t.Helper()
	s, err := httpd.Start(t.Context(), httpd.Options{Addr: "127.0.0.1:0", Role: "directory", Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	s.Serving(func() error {
		return nil
	}, func(context.Context) (httpd.Page, error) { return clusterPage(st, nil, nil), nil })
	return s
}

func read(t *testing.T, at string) string {
	t.Helper()
	r, err := http.Get(at)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d %.200s, %v", at, r.StatusCode, b, err)
	}
	return string(b)
}

// Each name that the directory tells is shown as it is, and none becomes HTML.
func TestPageOfOddNames(t *testing.T) {
	s := servePage(t, oddState())
	html := read(t, "http://"+s.Addr()+"/")
	for _, name := range []string{"client", "identity", "node", "domain", "trouble", "namespace", "owner", "who", "job",
		"reason", "member"} {
		if !strings.Contains(html, "&gt;"+name) {
			t.Errorf("the page does not show the %s", name)
		}
	}
	if strings.Contains(html, "<script>") || strings.Contains(html, "<img") {
		t.Errorf("names are HTML:\n%s", html)
	}
	if js := read(t, "http://"+s.Addr()+"/state.json"); strings.ContainsAny(js, "<>") {
		t.Errorf("names may be taken for HTML:\n%s", js)
	}
}

// The pictures show what is the matter: chains, copies that are missing, shards that split, and first the groups that
// lack something.
func TestPictures(t *testing.T) {
	all := simulations()
	text := func(p httpd.Picture) string {
		b, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for _, tc := range []struct{ state, picture, want string }{
		{"healthy", text(groupsPicture(all["healthy"])), `{"label":"orders 1: m1, m2","parts":[{"kind":"live"`},
		{"degraded", text(groupsPicture(all["degraded"])), `"bars":[{"label":"orders 1: m1","note":"1 of 2 copies","bad":true,`},
		{"degraded", text(nodesPicture(all["degraded"])), `{"label":"m2","note":"down, lends`},
		{"lost", text(groupsPicture(all["lost"])), `{"label":"orders 3: nowhere","note":"lost, 0 of 2 copies","bad":true,"parts":null}`},
		{"busy", text(shardsPicture(all["busy"])), `{"kind":"splitting","size":0.0625,"text":"shard 1, hashes 0000… in placement group 1, splitting to placement group 1"}`},
		{"busy", text(shardsPicture(all["busy"])), `{"kind":"moving","size":0.0625,"text":"shard 4, hashes 0011… in placement group 4, moving to placement group 4"}`},
	} {
		if !strings.Contains(tc.picture, tc.want) {
			t.Errorf("%s lacks %s:\n%s", tc.state, tc.want, tc.picture)
		}
	}
	follower := simulated(3, 3)
	for _, u := range follower.Usage {
		u.Estimated = false
	}
	if p := text(nodesPicture(follower)); !strings.Contains(p, `"granted"`) || strings.Contains(p, `"live"`) {
		t.Errorf("a follower's: %s", p)
	}
}

// Jobs tell how long they will take once two looks have found them at different places.
func TestJobsLeft(t *testing.T) {
	st := &dirpb.StatusReply{Jobs: []*dirpb.Job{{Id: 1, Total: 1000}, {Id: 2, Total: 10}, {Id: 3}}}
	var p paces
	now := time.Unix(1, 0)
	look := func(after time.Duration, done uint64, want string) {
		t.Helper()
		now = now.Add(after)
		st.Jobs[0].Done, st.Jobs[2].Done = done, done
		left := p.left(st, now)
		if got := leftText(left, 1); got != want || leftText(left, 2) != "-" || leftText(left, 3) != "-" ||
			leftText(left, 4) != "-" {
			t.Errorf("after %v: %s, want %s", after, got, want)
		}
	}
	look(0, 100, "-")
	look(time.Second, 110, "-") // too early to say
	look(9*time.Second, 200, "1m20s")
	look(25*time.Second, 200, "4m40s") // it was slower since
	look(31*time.Second, 200, "-")     // and has not got on for long
	look(10*time.Second, 500, "1m8s")
	look(10*time.Second, 50, "-") // another janitor begins anew
	look(2*time.Second, 51, "31m38s")
	look(29*time.Second, 51, "8h10m0s")
	look(10*time.Second, 1000, "0s")
	st.Jobs = st.Jobs[1:2]
	if p.left(st, now); len(p) != 1 {
		t.Errorf("%d jobs are remembered", len(p))
	}
	if s := leftText(map[uint32]time.Duration{1: mostLeft}, 1); s != "days" {
		t.Error(s)
	}
}

// browser runs Chromium, which make test-console names, on a page; the test is skipped without.
func browser(t *testing.T, at string, args ...string) string {
	t.Helper()
	path := os.Getenv("KVD_CHROMIUM")
	if path == "" {
		t.Skip("no KVD_CHROMIUM: make test-console")
	}
	home := t.TempDir()
	c := exec.CommandContext(t.Context(), path,
		append([]string{"--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
			"--virtual-time-budget=5000", "--user-data-dir=" + home}, append(args, at)...)...)
	c.Env = append(os.Environ(), "HOME="+home)
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s: %v", c, err)
	}
	return string(out)
}

// In a browser the page draws its pictures and goes on with what the process says, and odd names stay text.
func TestPageInBrowser(t *testing.T) {
	s := servePage(t, oddState())
	dom := browser(t, "http://"+s.Addr(), "--dump-dom")
	for _, w := range []string{`id="p0"`, `id="p2"`, `<rect `, `role="img" aria-label="&lt;script&gt;`,
		`<span class="label">&lt;script&gt;`, `<title>! kvd directory</title>`} {
		if !strings.Contains(dom, w) {
			t.Errorf("the page lacks %s", w)
		}
	}
	if strings.Contains(dom, "<script>") || strings.Contains(dom, "<img") || strings.Contains(dom, "<title>owned") {
		t.Errorf("names are HTML:\n%s", dom)
	}
	// The first answer is the page itself, and the polls get other ones.
	ready := func() error { return nil }
	s.Serving(ready, func(context.Context) (httpd.Page, error) {
		s.Serving(ready, func(context.Context) (httpd.Page, error) {
			return clusterPage(simulations()["lost"], nil, nil), nil
		})
		return clusterPage(simulations()["healthy"], nil, nil), nil
	})
	if dom := browser(t, "http://"+s.Addr(), "--dump-dom"); !strings.Contains(dom, `class="trouble"`) ||
		!strings.Contains(dom, "kvctl namespace accept-loss orders") || strings.Contains(dom, "healthy") {
		t.Errorf("the page is as it was:\n%s", dom)
	}
}

// A page that was told what changed, again and again, is the one that is told all at once.
func TestPageOfNewsInBrowser(t *testing.T) {
	main := func(steps []string, least int) string {
		t.Helper()
		s, all, asked := servePage(t, nil), simulations(), 0
		s.Serving(func() error { return nil }, func(context.Context) (httpd.Page, error) {
			st := all[steps[min(asked, len(steps)-1)]]
			asked++
			return clusterPage(st, nil, nil), nil
		})
		page, err := url.Parse("http://" + s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		news := 0
		proxy := httputil.NewSingleHostReverseProxy(page)
		proxy.ModifyResponse = func(r *http.Response) error {
			b, err := io.ReadAll(r.Body)
			if strings.Contains(string(b), `"since":`) {
				news++
			}
			r.Body = io.NopCloser(bytes.NewReader(b))
			return err
		}
		web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/state.json" {
				// an answer is given again for a second, and the browser's time is not ours
				time.Sleep(1100 * time.Millisecond)
			}
			proxy.ServeHTTP(w, r)
		}))
		defer web.Close()
		dom := browser(t, web.URL, "--dump-dom")
		if asked < len(steps) || news < least {
			t.Fatalf("%d answers, %d of them news", asked, news)
		}
		_, dom, _ = strings.Cut(dom, `<div id="health"`)
		// the process breaks lines, and the script does not
		return strings.Join(strings.Fields(strings.ReplaceAll(dom, "<", "\n<")), " ")
	}
	if got, want := main([]string{"healthy", "busy", "degraded", "lost"}, 2), main([]string{"lost"}, 0); got != want ||
		!strings.Contains(got, "nowhere") {
		t.Errorf("told by and by:\n%s\nat once:\n%s", got, want)
	}
}

// look is put behind the page, and tells by the body's attributes what a browser made of it once the pictures are
// there.
const look = `<script>
const seen = new MutationObserver(() => {
  if (!document.getElementById("p4")) return; // the last picture
  seen.disconnect();
  const all = (q) => [...document.querySelectorAll(q)];
  const say = (name, list) => document.body.setAttribute("data-" + name, list.join("|"));
  const named = (e) => e.getAttribute("aria-label") || document.getElementById(e.getAttribute("aria-labelledby"))?.textContent;
  say("wide", document.documentElement.scrollWidth > innerWidth ? [document.documentElement.scrollWidth] : []);
  say("nameless", all("[role=img],[role=region],main section[aria-labelledby]").filter((e) => !named(e)).map((e) => e.outerHTML));
  say("unreachable", all(".scroll").filter((e) => { e.focus(); return document.activeElement !== e; }).map((e) => e.outerHTML));
  say("pictures", [all("svg[role=img]").length]);
});
seen.observe(document.getElementById("pictures"), { childList: true });
</script>`

// On a phone as on a desk nothing is wider than the window, each picture and table has a name for screen readers, and
// the keyboard reaches each table that scrolls.
func TestPageLayoutInBrowser(t *testing.T) {
	st := simulations()["degraded"]
	st.Sessions[0].Client = strings.Repeat("long", 200)
	st.Map.Nodes[0].Name = strings.Repeat("long", 50)
	page, err := url.Parse("http://" + servePage(t, st).Addr())
	if err != nil {
		t.Fatal(err)
	}
	web := withScript(t, page, look)
	for _, size := range []string{"500,1000", "1600,1000"} {
		dom := browser(t, web.URL, "--dump-dom", "--window-size="+size)
		for _, w := range []string{`data-wide=""`, `data-nameless=""`, `data-unreachable=""`,
			fmt.Sprintf(`data-pictures="%d"`, 18+len(st.Jobs)+len(st.Map.Namespaces))} {
			if !strings.Contains(dom, w) {
				_, body, _ := strings.Cut(dom, "<body")
				t.Errorf("%s: no %s: %.600s", size, w, body)
			}
		}
	}
}

// withScript serves a page with a script of a test behind it.
func withScript(t *testing.T, page *url.URL, script string) *httptest.Server {
	proxy := httputil.NewSingleHostReverseProxy(page)
	proxy.ModifyResponse = func(r *http.Response) error {
		r.Header.Del("Content-Security-Policy") // it would refuse the script
		if r.Request.URL.Path != "/" {
			return nil
		}
		b, err := io.ReadAll(r.Body)
		b = append(b, script...)
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
		r.Header.Set("Content-Length", strconv.Itoa(len(b)))
		return err
	}
	web := httptest.NewServer(proxy)
	t.Cleanup(web.Close)
	return web
}

// sorts clicks the head of a column again and again, and tells what the column has each time.
const sorts = `<script>
const seen = new MutationObserver(() => {
  const table = [...document.querySelectorAll("#tables section")].find((s) => s.querySelector("h2").textContent === "Memory");
  const at = [...(table?.querySelectorAll("th") ?? [])].findIndex((h) => h.textContent === "Live");
  const th = table?.querySelectorAll("th")[at];
  if (!th?.firstElementChild) return;
  seen.disconnect();
  const cells = () => [...table.querySelectorAll("tbody tr")].map((r) => r.children[at].textContent).join("|");
  document.body.setAttribute("data-before", cells());
  for (const name of ["first", "second", "third"]) {
    th.firstElementChild.click();
    document.body.setAttribute("data-" + name, th.getAttribute("aria-sort") + "|" + cells());
  }
  document.body.setAttribute("data-ticks", [...document.querySelectorAll("#charts .ticks span")].map((e) => e.textContent).join("|"));
});
seen.observe(document.getElementById("tables"), { childList: true, subtree: true });
</script>`

// A click on the head of a column sorts a table by it, first from above, then from below, then not. A chart has an axis
// with numbers.
func TestPageSortsInBrowser(t *testing.T) {
	s := servePage(t, simulations()["busy"])
	s.Chart(httpd.Chart{Title: "Chart", Unit: "MiB", Lines: []httpd.Line{{Name: "line", Of: []string{"none"}}}})
	page, err := url.Parse("http://" + s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	dom := browser(t, withScript(t, page, sorts).URL, "--dump-dom")
	column := func(name string) []string {
		_, v, _ := strings.Cut(dom, "data-"+name+`="`)
		v, _, _ = strings.Cut(v, `"`)
		return strings.Split(v, "|")
	}
	amount := func(s string) float64 {
		number, unit, _ := strings.Cut(s, " ")
		n, err := strconv.ParseFloat(number, 64)
		power := slices.Index([]string{"B", "KiB", "MiB", "GiB", "TiB"}, unit)
		if err != nil || power < 0 {
			t.Fatalf("%q is no amount: %v", s, err)
		}
		return math.Ldexp(n, 10*power)
	}
	bytesOf := func(a, b string) int { return cmp.Compare(amount(a), amount(b)) }
	before := column("before")
	up := slices.SortedStableFunc(slices.Values(before), bytesOf)
	down := slices.Clone(up)
	slices.Reverse(down)
	if len(before) < 3 || slices.Equal(before, up) || slices.Equal(before, down) {
		t.Fatalf("%q show nothing", before)
	}
	for name, want := range map[string][]string{
		"first": append([]string{"descending"}, down...), "second": append([]string{"ascending"}, up...),
		"third": append([]string{"none"}, before...), "ticks": {"1", "0.5", "0"},
	} {
		if got := column(name); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// opens is put behind the page, and tells which rows are open before and after clicks on a first cell, and after the
// table was sorted the other way round.
const opens = `<script>
const seen = new MutationObserver(() => {
  const table = [...document.querySelectorAll("#tables section")].find((s) => s.querySelector("h2").textContent === "Memory nodes");
  const row = () => [...(table?.querySelectorAll("tbody tr") ?? [])].find((r) => r.querySelector("summary")?.textContent === "m2");
  if (!row() || !table.querySelector("th button")) return;
  seen.disconnect();
  const say = (name) => document.body.setAttribute("data-" + name, [...table.querySelectorAll("details[open]")].map((d) => d.querySelector("summary").textContent + " " + d.querySelector("li").textContent).join("|"));
  say("before");
  row().querySelector("summary").click();
  say("opened");
  table.querySelector("th button").click(); // m5 is above m1 now
  say("sorted");
  row().querySelector("summary").click();
  say("closed");
  document.body.setAttribute("data-lead", document.querySelector("#lead h2").textContent + "|" + document.querySelector("#lead tbody summary").textContent);
});
seen.observe(document.getElementById("tables"), { childList: true, subtree: true });
</script>`

// A click on the first cell of a row opens it, and it stays open where it goes. Namespaces come before everything else.
func TestPageOpensInBrowser(t *testing.T) {
	s := servePage(t, simulations()["healthy"])
	page, err := url.Parse("http://" + s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	dom := browser(t, withScript(t, page, opens).URL, "--dump-dom")
	const node = "m2 endpoint tcp: 10.0.0.2:7410, atomics by unspecified"
	for name, want := range map[string]string{"before": "", "opened": node, "sorted": node, "closed": "",
		"lead": "Namespaces|orders"} {
		if at := "data-" + name + `="` + want + `"`; !strings.Contains(dom, at) {
			t.Errorf("the page lacks %s", at)
		}
	}
	if t.Failed() {
		t.Log(dom[:min(len(dom), 2000)])
	}
}

// TestScreenshots makes pictures of the page in the folder KVD_SCREENSHOTS, to be looked at.
func TestScreenshots(t *testing.T) {
	dir := os.Getenv("KVD_SCREENSHOTS")
	if dir == "" {
		t.Skip("no KVD_SCREENSHOTS: make screenshots")
	}
	shot := func(name string, st *dirpb.StatusReply, args ...string) {
		file := filepath.Join(dir, name+".png")
		s := servePage(t, st)
		s.Linked(func() []httpd.Link {
			all := []httpd.Link{{Role: "directory", Name: "d2", Addr: "d2:7480"},
				{Role: "directory", Name: "d3", Addr: "d3:7480"},
				{Role: "gateway", Name: "web1 pid 812", Addr: "web1:7483"}}
			for _, n := range st.Map.Nodes {
				all = append(all, httpd.Link{Role: "memnode", Name: n.Name, Addr: n.Name + ":7481"})
			}
			return all
		})
		browser(t, "http://"+s.Addr(), append(args, "--screenshot="+file)...)
		if b, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(b), "\x89PNG") {
			t.Errorf("%s: %d bytes, %v", name, len(b), err)
		}
	}
	all := simulations()
	for name, st := range all {
		shot(name, st, "--window-size=1000,1500")
	}
	shot("phone", all["degraded"], "--window-size=500,1000", "--blink-settings=preferredColorScheme=0")
}
