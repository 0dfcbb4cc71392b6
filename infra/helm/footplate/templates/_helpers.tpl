{{- define "footplate.labels" -}}
app.kubernetes.io/name: footplate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "footplate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- define "footplate.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
{{- define "footplate.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}
{{- define "footplate.env" -}}
- {name: FOOTPLATE_CONFIG, value: /etc/footplate/config.yaml}
- {name: FOOTPLATE_DATA_DIR, value: /var/lib/footplate}
- {name: FOOTPLATE_SECURITY__MASTER_KEY_FILE, value: /run/footplate/master.key}
- name: FOOTPLATE_STORAGE__DATABASE_URL
  valueFrom:
    secretKeyRef: {name: {{ .Values.secretName | quote }}, key: database-url}
- name: FOOTPLATE_STORAGE__REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .Values.secretName | quote }}, key: redis-url}
# The root is read-only: what is compiled for this processor or GPU is kept here.
- {name: HOME, value: /tmp}
- {name: TRITON_CACHE_DIR, value: /tmp/triton}
{{- end }}
{{- define "footplate.rayEnv" -}}
{{- /* As footplate.deployments.ray_environment has it, which says why; tests/infra compares them. */ -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_DEDUP_LOGS, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, value: "2"}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "30"}
- {name: RAY_SERVE_FALLBACK_PROXY_HTTP_PORT, value: "8500"}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT, value: "20000"}
- {name: RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT, value: "20099"}
- {name: RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE, value: "1000"}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_HAPROXY_BINARY_PATH, value: /run/footplate/h/haproxy}
- {name: RAY_SERVE_HAPROXY_CONFIG_FILE_LOC, value: /run/footplate/h/haproxy.cfg}
- {name: RAY_SERVE_HAPROXY_SOCKET_PATH, value: /run/footplate/h/admin.sock}
- {name: RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH, value: /run/footplate/h/metrics.sock}
- {name: RAY_SERVE_HAPROXY_SERVER_STATE_BASE, value: /run/footplate/h}
- {name: RAY_SERVE_HAPROXY_SERVER_STATE_FILE, value: /run/footplate/h/server-state}
- {name: RAY_SERVE_HAPROXY_METRICS_PORT, value: "9101"}
- {name: RAY_SERVE_HAPROXY_STATS_PORT, value: "8404"}
- {name: RAY_SERVE_HAPROXY_METRICS_ENABLED, value: "0"}
- {name: RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S, value: "60"}
- {name: RAY_SERVE_HAPROXY_NBTHREAD, value: {{ .Values.gateways.haproxyThreads | quote }}}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: "3600"}
- {name: RAY_SERVE_PORT_QUARANTINE_S, value: "5"}
# A node that doesn't answer is held dead after 16 s, not 65: until then Ray starts replacements on it.
- {name: RAY_health_check_period_ms, value: "1000"}
- {name: RAY_health_check_timeout_ms, value: "3000"}
- {name: RAY_health_check_failure_threshold, value: "4"}
{{- end }}
{{- define "footplate.mounts" -}}
- {name: config, mountPath: /etc/footplate, readOnly: true}
- {name: run, mountPath: /run/footplate}
- {name: state, mountPath: /var/lib/footplate}
- {name: tmp, mountPath: /tmp}
{{- if .Values.engines.modelsClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
{{- define "footplate.volumes" -}}
- name: config
  configMap: {name: {{ .Release.Name }}-config}
- name: master-key
  secret:
    secretName: {{ .Values.secretName | quote }}
    defaultMode: 0440
    items: [{key: master.key, path: master.key}]
- name: run
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
- name: tmp
  emptyDir: {}
{{- if .Values.engines.modelsClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.engines.modelsClaim | quote }}, readOnly: true}
{{- end }}
{{- end }}
{{- define "footplate.setup" -}}
- name: setup
  image: {{ include "footplate.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python, -m, footplate.deployments.pod_setup, node, --folder, /run/footplate, --master-key, /etc/footplate-secret/master.key]
  securityContext:
    {{- include "footplate.security" . | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 512Mi}
  volumeMounts:
    - {name: run, mountPath: /run/footplate}
    - {name: tmp, mountPath: /tmp}
    - {name: master-key, mountPath: /etc/footplate-secret, readOnly: true}
{{- end }}
