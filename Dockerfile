# The server in a container, from the released file:
#   scripts/build_pyz.sh && docker build -t llmgw .
#   docker run -p 7443:7443 -p 8080:8080 -v llmgw:/var/lib/llmgw -v /etc/llmgw:/etc/llmgw:ro llmgw -c /etc/llmgw/server.yaml
FROM debian:12-slim
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 ca-certificates tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin llmgw \
    && install -d -o llmgw -g llmgw -m 0700 /var/lib/llmgw \
    && install -d -m 0755 /usr/local/lib/llmgw/unpacked /usr/local/lib/llmgw/plugins
ARG TARGETARCH
COPY dist/llmgw-*-linux-*.pyz dist/SHA256SUMS /tmp/dist/
# checked, unpacked by root and seen to run: the server's user can read what it runs and change none of it
RUN case "${TARGETARCH:-$(dpkg --print-architecture)}" in amd64) arch=x86_64 ;; arm64) arch=aarch64 ;; esac \
    && cd /tmp/dist && file=$(ls llmgw-*-linux-"$arch".pyz) \
    && grep "  $file\$" SHA256SUMS | sha256sum -c - \
    && install -m 0755 "$file" /usr/local/lib/llmgw/ \
    && ln -s "$file" /usr/local/lib/llmgw/current \
    && printf '#!/bin/sh\nexec /usr/bin/python3 -IS /usr/local/lib/llmgw/current "$@"\n' >/usr/local/bin/llmgw \
    && chmod 0755 /usr/local/bin/llmgw && llmgw --version && rm -rf /tmp/dist
USER llmgw
EXPOSE 7443 8080
VOLUME /var/lib/llmgw
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/llmgw", "server"]
