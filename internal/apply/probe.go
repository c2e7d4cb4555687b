package apply

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"sluice/internal/contract"
)

// Limits of a probe.
const (
	answerTime  = time.Second
	execTime    = 10 * time.Second
	execOutput  = 1 << 10
	answerLimit = 4 << 20 // bytes of an answer that are read
	downEvery   = 20 * time.Millisecond
	downLimit   = time.Minute // how long an answer is watched for after the restart
)

// ask asks a tcp or http probe. HTTP is plain HTTP/1.1 to loopback, and of the
// answer the status line is all that is read: root links no HTTP library.
func ask(ctx context.Context, p contract.Probe) error {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	switch {
	case p.TCP != "":
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.TCP)
		if err != nil {
			return err
		}
		return c.Close()
	case p.HTTP != "":
		return askHTTP(ctx, p)
	}
	return nil
}

func askHTTP(ctx context.Context, p contract.Probe) error {
	u, err := url.Parse(p.HTTP)
	if err != nil {
		return err
	}
	host := u.Host
	if u.Port() == "" {
		host = net.JoinHostPort(u.Hostname(), "80")
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", host)
	if err != nil {
		return err
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: sluice\r\nConnection: close\r\n\r\n", u.RequestURI(), u.Host); err != nil {
		return err
	}
	in := bufio.NewReader(io.LimitReader(c, answerLimit))
	line, err := in.ReadString('\n')
	if err != nil {
		return fmt.Errorf("no status line: %w", err)
	}
	// The rest is read and thrown away, as far as it comes: a service whose
	// client hangs up in the middle of an answer may log that as an error.
	_, _ = io.Copy(io.Discard, in)
	fields := strings.Fields(line)
	if len(fields) < 2 || !strings.HasPrefix(fields[0], "HTTP/1.") || len(fields[1]) != 3 {
		return fmt.Errorf("no status line: %q", contract.Clip(line))
	}
	status, err := strconv.Atoi(fields[1])
	if err != nil {
		return fmt.Errorf("no status line: %q", contract.Clip(line))
	}
	if p.Status != 0 && status != p.Status {
		return fmt.Errorf("status %d, not %d", status, p.Status)
	}
	return nil
}

// A downtime measures, by the tcp and http probes, how long a service did not
// answer around its restart.
type downtime struct {
	probes []contract.Probe
	once   sync.Once
	cancel context.CancelFunc
	done   chan struct{}

	mu   sync.Mutex
	down time.Duration
}

func watchDowntime(probes []contract.Probe) *downtime {
	d := &downtime{down: -1, done: make(chan struct{})}
	for _, p := range probes {
		if len(p.Exec) == 0 {
			d.probes = append(d.probes, p)
		}
	}
	return d
}

// start begins to watch; the second call does nothing. A service that does not
// answer now has no last good answer, so there is nothing to measure.
func (d *downtime) start() {
	d.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), downLimit)
		d.cancel = cancel
		if len(d.probes) == 0 || !d.answers(ctx) {
			close(d.done)
			return
		}
		d.set(0)
		go d.watch(ctx, time.Now())
	})
}

func (d *downtime) answers(ctx context.Context) bool {
	for _, p := range d.probes {
		if ask(ctx, p) != nil {
			return false
		}
	}
	return true
}

func (d *downtime) watch(ctx context.Context, good time.Time) {
	defer close(d.done)
	tick := time.NewTicker(downEvery)
	defer tick.Stop()
	missed := false
	for {
		switch ok := d.answers(ctx); {
		case ok && missed:
			d.set(time.Since(good))
			return
		case ok:
			good = time.Now()
		case ctx.Err() != nil:
		default:
			missed = true
		}
		select {
		case <-ctx.Done():
			if missed { // who stops the watch has had an answer
				d.set(time.Since(good))
			}
			return
		case <-tick.C:
		}
	}
}

func (d *downtime) set(v time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.down = v
}

// took is the measured time; negative if it could not be measured.
func (d *downtime) took() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.down
}

func (d *downtime) stop() {
	if d.cancel != nil {
		d.cancel()
		<-d.done
	}
}
