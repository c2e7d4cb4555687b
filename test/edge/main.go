// Edge is the small HTTP service that the demo and the tests roll. What is
// wrong with a version is built into it.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
)

// Set when it is built.
var (
	version = "0"
	fault   = "" // see serve
)

const address = "127.0.0.1:8080"

func main() {
	verb := "serve"
	if len(os.Args) > 1 {
		verb = os.Args[1]
	}
	switch verb {
	case "version":
		fmt.Println("edge", version)
	case "check": // an exec probe
		if _, err := get(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "hammer":
		hammer()
	case "keep":
		select {}
	default:
		if err := serve(); err != nil {
			fmt.Fprintln(os.Stderr, "edge:", err)
			os.Exit(1)
		}
	}
}

func serve() error {
	switch fault {
	case "exits":
		return errors.New("the flux capacitor is missing")
	case "exits 0":
		os.Exit(0)
	case "exits 78":
		fmt.Fprintln(os.Stderr, "edge: the configuration can't be served")
		os.Exit(78)
	case "kills all": // its whole control group: all that its user runs
		_ = syscall.Kill(-1, syscall.SIGKILL) // but for itself (kill(2))
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "forks": // leaves a child that keeps the port, and goes
		c := exec.Command("/proc/self/exe", "keep")
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		c.ExtraFiles = activation.Files(false)
		if err := c.Start(); err != nil {
			return err
		}
		return errors.New("it has left a child")
	case "slow":
		time.Sleep(15 * time.Second)
	case "stubborn": // does not end when it is asked to
		signal.Ignore(syscall.SIGTERM)
		_, _ = daemon.SdNotify(false, daemon.SdNotifyReady)
		select {}
	case "deaf": // answers nothing
		_, _ = daemon.SdNotify(false, daemon.SdNotifyReady)
		select {}
	}
	listener, err := listen()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if fault == "dies" {
		time.AfterFunc(5*time.Second, func() { fmt.Fprintln(os.Stderr, "edge: out of cheese"); os.Exit(3) })
	}
	// Told to end it takes no more connections, which queue at the socket for the
	// next process, and answers those that it has: Server.Shutdown would drop one
	// whose request comes in right then.
	var open sync.WaitGroup
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, version) }),
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				open.Add(1)
			case http.StateClosed:
				open.Done()
			}
		}}
	s.SetKeepAlivesEnabled(false)
	go func() {
		<-ctx.Done()
		listener.Close()
	}()
	_, _ = daemon.SdNotify(false, daemon.SdNotifyReady)
	err = s.Serve(listener)
	if ctx.Err() == nil {
		return err
	}
	answered := make(chan struct{})
	go func() { open.Wait(); close(answered) }()
	select {
	case <-answered:
	case <-time.After(5 * time.Second): // somebody who asks nothing
	}
	return nil
}

// listen takes the socket that systemd holds, so that clients queue while the
// service is restarted.
func listen() (net.Listener, error) {
	ls, err := activation.Listeners()
	if err != nil || len(ls) == 1 {
		return ls[0], err
	}
	return net.Listen("tcp", address)
}

func get() (string, error) {
	c := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := c.Get("http://" + address + "/")
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	var v string
	_, err = fmt.Fscan(r.Body, &v)
	return v, err
}

// hammer asks without a pause until it is told to stop, and says how often it
// was answered and how often not.
func hammer() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	answered, lost := map[string]int{}, 0
	for ctx.Err() == nil {
		if v, err := get(); err != nil {
			lost++
		} else {
			answered[v]++
		}
	}
	for v, n := range answered {
		fmt.Printf("%d answers by %s, ", n, v)
	}
	fmt.Printf("%d lost\n", lost)
}
