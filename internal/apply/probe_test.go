package apply

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/internal/contract"
)

func TestProbes(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	defer s.Close()
	liar, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer liar.Close()
	go func() {
		for {
			c, err := liar.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, "220 mail.example.com\r\n")
			c.Close()
		}
	}()
	for _, c := range []struct {
		probe contract.Probe
		says  string
	}{
		{contract.Probe{HTTP: s.URL + "/x"}, ""},
		{contract.Probe{HTTP: s.URL, Status: 418}, ""},
		{contract.Probe{HTTP: s.URL, Status: 200}, "status 418, not 200"},
		{contract.Probe{TCP: s.Listener.Addr().String()}, ""},
		{contract.Probe{TCP: "127.0.0.1:1"}, "refused"},
		{contract.Probe{HTTP: "http://127.0.0.1:1/"}, "refused"},
		{contract.Probe{HTTP: "http://" + liar.Addr().String()}, "no status line"},
	} {
		err := ask(context.Background(), c.probe)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.probe, err)
		}
	}
}

// The time without an answer is told, also when the gate has the answer first.
func TestDowntime(t *testing.T) {
	var up atomic.Bool
	up.Store(true)
	var asked atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if !up.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer s.Close()
	d := watchDowntime([]contract.Probe{{HTTP: s.URL, Status: 200}})
	d.start()
	up.Store(false)
	for n := asked.Load(); asked.Load() < n+3; { // until it has missed an answer
		time.Sleep(time.Millisecond)
	}
	d.stop()
	if d.took() <= 0 {
		t.Errorf("%s without an answer", d.took())
	}
	never := watchDowntime([]contract.Probe{{TCP: "127.0.0.1:1"}})
	never.start()
	never.stop()
	if never.took() >= 0 {
		t.Errorf("%s, and there was no last good answer", never.took())
	}
}
