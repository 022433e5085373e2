package memcached_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/memcached"
	"github.com/kvd-project/kvd/internal/testutil"
)

// Of many clients that miss an item, or find it stale or about to expire, one is told to renew it, whichever gateway it
// asks.
func TestOneWins(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	a, _ := serve(t, memcached.Options{Client: store})
	b, _ := serve(t, memcached.Options{Client: store})
	for round := range 30 {
		for _, x := range []struct{ before, say string }{
			{"", fmt.Sprintf("mg miss%d v N30", round)},
			{fmt.Sprintf("set stale%d 0 0 1\r\nx\r\nmd stale%d I\r\n", round, round),
				fmt.Sprintf("mg stale%d v", round)},
			{fmt.Sprintf("set old%d 0 20 1\r\nx\r\n", round), fmt.Sprintf("mg old%d v R30", round)},
		} {
			talk(t, a, x.before)
			var wg sync.WaitGroup
			heads := make([]string, 8)
			for i := range heads {
				addr := []string{a, b}[i%2]
				wg.Go(func() {
					c, err := net.Dial("tcp", addr)
					if err != nil {
						t.Error(err)
						return
					}
					defer c.Close()
					c.SetDeadline(time.Now().Add(testutil.Limit))
					io.WriteString(c, x.say+"\r\n") //nolint:errcheck // reading tells
					heads[i], _ = bufio.NewReader(c).ReadString('\n')
				})
			}
			wg.Wait()
			won, told := 0, 0
			for _, h := range heads {
				if strings.HasSuffix(h, " W\r\n") {
					won++
				} else if strings.Contains(h, " Z") {
					told++
				}
			}
			if won != 1 || told != len(heads)-1 {
				t.Fatalf("%s: %d won and %d were told so: %q", x.say, won, told, heads)
			}
		}
	}
}
