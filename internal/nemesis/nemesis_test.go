package nemesis

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/rdma"
)

var (
	seed     = flag.Uint64("seed", 0, "of the scheduler; 0: chosen")
	provider = flag.String("provider", "tcp", "of the clients: tcp or shm")
	replicas = flag.Int("replicas", 2, "copies of every record")
	lease    = flag.Duration("lease", 0, "of sessions and memory nodes; 0: 1s, with -zombies alone 200ms")
	memory   = flag.String("memory", "256MiB", "that each memory node lends")
	kills    = flag.Int("kills", 0, "nothing but so many kills of memory nodes")
	stops    = flag.Int("stops", 0, "nothing but so many ends of the directory's leader, of its followers, of a "+
		"memory node and of a gateway, by SIGTERM and by SIGKILL each")
	restarts = flag.Bool("restarts", false, "nothing but kills of memory nodes' workers, whose memory their keepers "+
		"hold, one every 2s; with -zombies, one for each of them")
	control = flag.Bool("control", false, "-restarts without keepers: the run has to notice what is lost")
	zombies = flag.Int("zombies", 0, "nothing but so many stops of writing clients beyond their lease")
	only    = flag.String("faults", "", "kinds of faults, separated by commas; none: all of "+strings.Join(kinds, ","))
)

// TestMain is also the programs inside of the namespaces.
func TestMain(m *testing.M) {
	var err error
	switch p := os.Getenv("KVD_NEMESIS_PROGRAM"); p {
	case "":
		os.Exit(m.Run())
	case "load":
		var cfg loadConfig
		if err = json.Unmarshal([]byte(os.Getenv("KVD_NEMESIS_LOAD")), &cfg); err == nil {
			err = untilTerm(cfg.Provider, func(ctx context.Context, d *rdma.Device) error {
				return loadMain(ctx, d, cfg)
			})
		}
	case "watch":
		err = watchMain(strings.Split(os.Getenv("KVD_NEMESIS_DIRECTORY"), ","))
	case "redis":
		var cfg redisConfig
		if err = json.Unmarshal([]byte(os.Getenv("KVD_NEMESIS_LOAD")), &cfg); err == nil {
			err = redisMain(cfg)
		}
	case "soak", "measure":
		var cfg soakConfig
		if err = json.Unmarshal([]byte(os.Getenv("KVD_NEMESIS_LOAD")), &cfg); err == nil && p == "soak" {
			err = untilTerm(cfg.Provider, func(ctx context.Context, d *rdma.Device) error {
				return soakMain(ctx, d, cfg)
			})
		} else if err == nil {
			err = measureMain(cfg)
		}
	default:
		err = fmt.Errorf("KVD_NEMESIS_PROGRAM=%q: want load, watch, redis, soak or measure", p)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// TestNemesis runs for as long as KVD_NEMESIS says, such as 2m.
func TestNemesis(t *testing.T) {
	s := flagged(t, "KVD_NEMESIS", "make nemesis")
	nemesis(t, s, func(h *harness) error {
		var err error
		switch {
		case s.zombies > 0:
			err = h.undead()
		case s.kills > 0:
			err = h.onlyKills()
		case s.stops > 0:
			err = h.onlyStops()
		case s.control:
			return h.withoutKeepers()
		case s.restarts:
			err = h.onlyRestarts()
		default:
			err = h.mixed()
		}
		if err != nil {
			return err
		}
		return h.finish()
	})
}

// flagged are the settings that the flags say, of a run for as long as a variable of the
// environment says.
func flagged(t *testing.T, variable, target string) settings {
	want := os.Getenv(variable)
	if want == "" {
		t.Skipf("it breaks a store in network namespaces for as long as %s says, as root: %s", variable, target)
	}
	duration, err := time.ParseDuration(want)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	s := settings{duration: duration, seed: *seed, provider: *provider, replicas: *replicas, lease: *lease,
		epochInterval: 100 * time.Millisecond, memory: *memory, clients: 4, kills: *kills, stops: *stops,
		zombies: *zombies, restarts: *restarts, control: *control}
	if *only != "" {
		s.only = strings.Split(*only, ",")
	}
	if err := s.check(); err != nil {
		t.Fatal(err)
	}
	return s
}

// nemesis brings a store up, lets run break it, and judges.
func nemesis(t *testing.T, s settings, run func(*harness) error) {
	var err error
	if os.Getuid() != 0 {
		err = errors.New("only root makes network namespaces")
	} else {
		err = networkTools(fmt.Sprint(os.Getpid()))
	}
	if err != nil {
		if os.Getenv("KVD_NEMESIS_REQUIRED") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()

	h, err := newHarness(ctx, s)
	defer func() {
		if err := h.close(); err != nil {
			t.Error(err)
		}
		fmt.Printf("\n%s\n", h.summary())
		if s.control {
			h.reportControl(t)
		} else {
			h.reportFailures(t)
		}
	}()
	if err == nil {
		err = run(h)
	}
	if err != nil && len(h.mu.failures) == 0 {
		h.fail(err.Error())
	}
}

// check completes s.
func (s *settings) check() error {
	if s.seed == 0 {
		s.seed = rand.Uint64()
	}
	if s.lease == 0 {
		s.lease = time.Second
		if s.zombies > 0 && !s.restarts {
			s.lease = 200 * time.Millisecond
		}
	}
	s.disks, s.keep = s.stops > 0, s.restarts && !s.control || s.kills > 0
	s.beside = s.replicas > 1 && !s.restarts && s.zombies+s.stops == 0
	if s.zombies > 0 {
		s.clients, s.epochInterval = 6, 10*time.Millisecond
	}
	switch {
	case s.provider != "tcp" && s.provider != "shm":
		return fmt.Errorf("-provider %q: want tcp or shm", s.provider)
	case s.replicas < 1 || s.replicas > 3:
		return fmt.Errorf("-replicas %d: want 1 to 3", s.replicas)
	case min(s.kills, 1)+min(s.stops, 1)+min(s.zombies, 1) > 1, s.restarts && s.kills+s.stops > 0:
		return errors.New("-kills, -stops, -restarts and -zombies: want one, or -restarts with -zombies")
	case s.control && (!s.restarts || s.zombies > 0 || s.replicas != 1):
		return errors.New("-control: want it with -restarts -replicas 1 and without -zombies")
	case s.kills+s.stops > 0 && s.replicas < 2:
		return errors.New("-kills, -stops: a memory node's death costs its data unless there are -replicas 2")
	}
	for _, k := range s.only {
		if !slices.Contains(kinds, k) {
			return fmt.Errorf("-faults %q: want some of %s", k, strings.Join(kinds, ","))
		}
	}
	return nil
}

// reportFailures turns what went wrong into the test's result.
func (h *harness) reportFailures(t *testing.T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, f := range h.mu.failures {
		if i == 20 {
			t.Errorf("and %d more", len(h.mu.failures)-i)
			break
		}
		t.Error(f)
	}
}
