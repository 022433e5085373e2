package ycsb

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"
)

func TestZeta(t *testing.T) {
	for _, n := range []uint64{1, 2, exactTerms, exactTerms + 1, 300_000} {
		var want float64
		for i := n; i >= 1; i-- {
			want += math.Pow(float64(i), -Theta)
		}
		if got := zeta(n, Theta); math.Abs(got-want) > 1e-9 {
			t.Errorf("zeta(%d) = %v, want %v", n, got, want)
		}
	}
	// The constant in YCSB's ScrambledZipfianGenerator.
	if got := zeta(scatterItems, Theta); math.Abs(got-26.46902820178302) > 1e-6 {
		t.Errorf("zeta(1e10) = %v", got)
	}
}

func TestZipfShape(t *testing.T) {
	const n, draws = 1000, 2_000_000
	rng := rand.New(rand.NewPCG(1, 1))
	z := NewZipf(n, Theta)
	count := make([]float64, n)
	for range draws {
		count[z.Next(rng)]++
	}
	zn := zeta(n, Theta)
	for rank := range 2 { // exact
		want := draws / (math.Pow(float64(rank+1), Theta) * zn)
		if math.Abs(count[rank]-want) > 5*math.Sqrt(want) {
			t.Errorf("rank %d drawn %v times, want %v", rank, count[rank], want)
		}
	}
	// Beyond them Gray's inversion is an approximation: compare cumulative shares.
	var got, want float64
	for rank := range n {
		got += count[rank] / draws
		want += 1 / (math.Pow(float64(rank+1), Theta) * zn)
		if rank >= 2 && math.Abs(got-want) > 0.03 {
			t.Fatalf("ranks up to %d have share %.4f, want %.4f", rank, got, want)
		}
	}
	for _, n := range []uint64{1, 2, 3} {
		z := NewZipf(n, Theta)
		for range 1000 {
			if r := z.Next(rng); r >= n {
				t.Fatalf("rank %d of %d", r, n)
			}
		}
	}
}

func TestZipfGrow(t *testing.T) {
	z := NewZipf(10, Theta)
	z.Grow(5)
	z.Grow(1000)
	w := NewZipf(1000, Theta)
	if z.n != w.n || math.Abs(z.zetan-w.zetan) > 1e-9 || math.Abs(z.eta-w.eta) > 1e-9 {
		t.Errorf("grown %+v, made %+v", *z, *w)
	}
}

func generator(t *testing.T, name string, d Distribution, k *Keyspace, seed uint64) *Generator {
	t.Helper()
	w, err := ByName(name)
	if err != nil {
		t.Fatal(err)
	}
	g, err := New(Options{Workload: w, Distribution: d, Keyspace: k, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestMixes(t *testing.T) {
	const draws = 100_000
	for _, w := range Workloads() {
		k := NewKeyspace(1000)
		g := generator(t, w.Name, 0, k, 7)
		var got [NumOps]float64
		for range draws {
			r := g.Next()
			got[r.Op]++
			if r.Op == Insert {
				k.Inserted(r.Record)
			} else if r.Record >= k.End() {
				t.Fatalf("%s: record %d of %d", w.Name, r.Record, k.End())
			}
			if (r.Op == Scan) != (r.ScanLen > 0) || r.ScanLen > MaxScanLen {
				t.Fatalf("%s: %v of %d records", w.Name, r.Op, r.ScanLen)
			}
		}
		for op, share := range map[Op]int{Read: w.Read, Update: w.Update, Insert: w.Insert, Scan: w.Scan,
			ReadModifyWrite: w.ReadModifyWrite} {
			if math.Abs(got[op]/draws*100-float64(share)) > 0.8 {
				t.Errorf("%s: %.2f%% %v, want %d%%", w.Name, got[op]/draws*100, op, share)
			}
		}
	}
}

func TestUniform(t *testing.T) {
	const n, draws = 500, 500_000
	g := generator(t, "C", Uniform, NewKeyspace(n), 3)
	var count [n]float64
	for range draws {
		count[g.Next().Record]++
	}
	var chi2 float64
	for _, c := range count {
		chi2 += (c - draws/n) * (c - draws/n) / (draws / n)
	}
	// 499 degrees of freedom: mean 499, standard deviation 31.6.
	if chi2 > 499+5*31.6 || chi2 < 499-5*31.6 {
		t.Errorf("chi-square %.0f for 499 degrees of freedom", chi2)
	}
}

func TestScatteredZipfian(t *testing.T) {
	const n, draws = 100_000, 1_000_000
	g := generator(t, "C", Zipfian, NewKeyspace(n), 5)
	count := make([]int, n)
	for range draws {
		count[g.Next().Record]++
	}
	hot, half := 0, [2]int{}
	for i, c := range count {
		if c > count[hot] {
			hot = i
		}
		half[i*2/n] += c
	}
	// Rank 0 has share 1/zeta(1e10); its record may have a little more.
	if share := float64(count[hot]) / draws; share < 0.037 || share > 0.040 {
		t.Errorf("hottest record has share %.4f, want about 0.0378", share)
	}
	if want := int(fnv64(0) % n); hot != want {
		t.Errorf("hottest record is %d, want %d, where rank 0 is scattered to", hot, want)
	}
	if r := float64(half[0]) / draws; r < 0.35 || r > 0.65 {
		t.Errorf("share %.3f of requests in the lower half: hot records are not scattered", r)
	}
}

func TestLatest(t *testing.T) {
	const loaded, inserts, draws = 1000, 500, 400_000
	k := NewKeyspace(loaded)
	g := generator(t, "D", 0, k, 9)
	for range inserts {
		k.Inserted(k.reserve())
	}
	count := make(map[uint64]float64)
	var reads float64
	for reads < draws {
		if r := g.Next(); r.Op == Read { // inserts stay unacknowledged
			if r.Record >= loaded+inserts {
				t.Fatalf("record %d is not in the store", r.Record)
			}
			count[r.Record]++
			reads++
		}
	}
	newest := uint64(loaded + inserts - 1)
	want := draws / zeta(loaded+inserts, Theta)
	if c := count[newest]; math.Abs(c-want) > 5*math.Sqrt(want) {
		t.Errorf("newest record read %v times, want %v", c, want)
	}
	if count[newest] <= count[newest-1] || count[newest-1] <= count[newest-20] {
		t.Errorf("reads by age 0, 1, 20: %v, %v, %v", count[newest], count[newest-1], count[newest-20])
	}
}

func TestKeyspaceHasNoGaps(t *testing.T) {
	k := NewKeyspace(10)
	a, b, c := k.reserve(), k.reserve(), k.reserve()
	for _, s := range []struct{ done, end uint64 }{{c, 10}, {b, 10}, {c, 10}, {a, 13}, {a, 13}, {99, 13}} {
		if k.Inserted(s.done); k.End() != s.end {
			t.Fatalf("after record %d: end %d, want %d", s.done, k.End(), s.end)
		}
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 1000 {
				k.Inserted(k.reserve())
			}
		})
	}
	wg.Wait()
	if k.End() != 4013 || len(k.mu.late) != 0 {
		t.Errorf("end %d with %d late, want 4013 and none", k.End(), len(k.mu.late))
	}
}

func TestSeedsRepeat(t *testing.T) {
	a, b, c := generator(t, "E", 0, NewKeyspace(100), 1), generator(t, "E", 0, NewKeyspace(100), 1),
		generator(t, "E", 0, NewKeyspace(100), 2)
	same := 0
	for range 1000 {
		ra, rb, rc := a.Next(), b.Next(), c.Next()
		if ra != rb {
			t.Fatalf("same seed: %+v and %+v", ra, rb)
		}
		if ra == rc {
			same++
		}
	}
	if same > 300 {
		t.Errorf("another seed repeats %d of 1000 requests", same)
	}
}

func TestKey(t *testing.T) {
	for n, want := range map[uint64]string{0: "user000000000000", 7: "user000000000007",
		123456789012: "user123456789012"} {
		if got := string(Key(nil, n)); got != want || len(got) != KeyLen {
			t.Errorf("Key(%d) = %q, want %q", n, got, want)
		}
	}
	if got := string(Key([]byte("p/"), 12)); got != "p/user000000000012" {
		t.Errorf("appended %q", got)
	}
}

func TestValidate(t *testing.T) {
	a, _ := ByName("a")
	for name, o := range map[string]Options{
		"shares":       {Workload: Workload{Read: 99, Distribution: Uniform}, Keyspace: NewKeyspace(1)},
		"no keyspace":  {Workload: a},
		"no records":   {Workload: a, Keyspace: NewKeyspace(0)},
		"distribution": {Workload: a, Keyspace: NewKeyspace(1), Distribution: 9},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := ByName("G"); err == nil {
		t.Error("workload G accepted")
	}
	if _, err := ParseDistribution("normal"); err == nil {
		t.Error("distribution normal accepted")
	}
	for _, s := range []string{"uniform", "zipfian", "zipf", "latest"} {
		if d, err := ParseDistribution(s); err != nil || d == 0 {
			t.Errorf("%s: %v %v", s, d, err)
		}
	}
}
