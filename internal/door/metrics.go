package door

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// metrics are what the door tells of itself.
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	bytes    prometheus.Counter
	waiting  prometheus.Gauge
}

func newMetrics() *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sluice_door_requests_total", Help: "Requests, by what was asked for and the status of the answer."}, []string{"kind", "status"}),
		seconds:  prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "sluice_door_request_seconds", Help: "How long requests took, by what was asked for.", Buckets: []float64{.001, .01, .1, 1, 10, 60, 600}}, []string{"kind"}),
		bytes:    prometheus.NewCounter(prometheus.CounterOpts{Name: "sluice_door_sent_bytes_total", Help: "Bytes of bodies that were sent."}),
		waiting:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "sluice_door_waiting", Help: "Boxes that wait for the bell."}),
	}
	m.registry.MustRegister(m.requests, m.seconds, m.bytes, m.waiting, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Health is for who watches the door, on an address of its own: /healthz says
// whether the store can be read, /metrics are for Prometheus.
func (d *Door) Health() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(d.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if err := d.healthy(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	})
	return mux
}
