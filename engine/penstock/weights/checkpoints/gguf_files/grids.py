"""The grids of GGUF's i-quants: which 8 magnitudes (4 in IQ3) each index stands for. ggml-common.h defines
them."""

from __future__ import annotations

import base64
import zlib
from functools import cache

import torch
from torch import Tensor

#: Where a code of four bits has the sign of a weight.
SIGN = 8
#: Per type, for all weights of all indices the number of its magnitude in rising order, two in a byte, the
#: first in the low half. IQ1's are -1, 0 and 1.
_PACKED = {
    "IQ2_XXS": (
        "c-l>qi;V*@2t*APfGYs^U*x@kBs#4o>o^88pPX}!g9HU0Fgqt~e{fLX0SoqH4;Qe@_q&A-p58Pto&ai;pJq{Zs<-JpG<F*6q#iXl"
        "XXSf|gVJS}{bC=S=KXd62c<zgIg+RE4rR^y+~06f;O&sA&=bZd16!~LCyO@h72l~o(e!_ud&44@l9_*q-6=JWTJ{nxk@Y3~M7qqv"
        "-7<Ux(5;ZN1Rbo4JxlYO{C-W3ieSx6HG*03K5a0v^V%%m2<R)bBywmvlpH$VZcf{AO$ytn8B7f#xQh2lw_u8!j%Y3=WJENGH^a(-"
        "vzDn_sQRo0l(D)?C|0gDkFHSA_>n+lWoX4*g$-+L{WG@_LJEcF7;WQt{S42K>6K0I4zFg90Q81H&Pj39`2_+CX*M!*6oH$7Q0CyB"
        "L~K;Z4GRKOTN#(&MAPrhAmcDBiOvLxs#`d9u1}~^!Lq!}ei`nH-PylM;mepPVMRnPN-e@Oriz%-li%>&4ImjVjX-wU2lvviIN#L1"
        "5kiT>3n|`2vq?;ITVv~l)^RbA)l#%*<=y)0qRbOH8Yni80okh&@(=05EQJ"
    ),
    "IQ2_XS": (
        "c-mE!3zFn82txxWFq{B$|3mH*B-6F+QcXUNZG@zGp6788pg;q&=Q$w3wVmJ~Kmj|v2MO-kj~xUkV9ER31swz^V3+6M-rdL;2PC*a"
        "8#@S4pn*Aad=KOxKmiM$#~!kP75DW!uttCaX3pnZgdMKW787ql4RjKX1Q)1C2LTG0^VYX;2LTFL@El|;Ay(Yij~Jaoqkvg(jwQ<u"
        "*JnwyT;gnY&mk~<Npx^($@E#JW;8G>)?1PT*x~*x;q{T;%mp@8-M=PS-RIWZ2xm2rm+S87#Mw4#w%VjNh;q>^Iz{6&&zAy~t@2dX"
        "G_-S$rz8C}*LR8@&+phaTo>p38h@@?-hHVqz`{=mxnl5P@(cr7Ktlr2LI>QlVmY~jvFT*|C!Ax+yqrzdWmV^|kWQ3kt)K#=4is&-"
        "dj#eydCA+wpshSdc(xMx39z>S(e;UuBYEVCQa>8t)jmZ^X=3>LPplls9l_okLqZ!0=^O#qbPo}GF@^hLF+^Q?9kcPidDpW+fd;k~"
        "mQ7_z*--3?8QEwE*6z>BUJ{qAPoE`T@|9d8w+WKoXB=M{sP)qvbw#Y$w&u@NP<$w48Yjv`k%Q|$v-xf{%C`L+d8`R_tKVnF^EO=%"
        "q{`!K&c16-6wV|}8Y>EY^cgk)2Rfc>UXy}Y@QHhFa{cre+BfFpE~!;<G$x1r5tugr3~y_VF@C(}_cs7^xNaXY>X4$0(wEufnj=|n"
        "K$NyD{sQxi%H-XK2IR9Z;Sm-0mK4ewhy+CS2wla0;iA=vmdqNvPuLtsN>q;ECUkHH^JBUj;B-vNc2=Um%%@qWM}W`%OHk}9Z4}#z"
        "=LsuRH^vgtUvNpRg;<H1F`OE}W`ALZJ?q9BYCh7Q@vL;moNAcl<tqFOy*zbm!%vNjhAtf3s+29YZD@&@%P~oHvG*ObJh}mp!k-@F"
        "O9)?Z!uDnL2~b?B*tjBtuP0DNx&(s)=)%EuLBPg!0G)(L-R!!kiSqhB*%Q7#39ZysO7K@{!7xoym)j<wWnc*5{TtTUn7SKz(jBdw"
        "qLejij81{fsTmx<VTbln982)&1et#S0RE(3Is"
    ),
    "IQ2_S": (
        "c-mE036?842s4}jI05$k4>?-W$)D8I>rSf53kV^fb4~&cEbxGca|#&Xh95|vfd!&)9~j`4UrwNb1!8a?7~qZvPN0DW;^O}GWDPtZ"
        "a1}7X1-OU=8dx9__tOhYpn(OV@jEcUZ7;fk1!8e;y@>=Gh=<>vH^r-g1tJndd!rAC!gpYRTi$$s0?@z%>SBbKS~;%)F2DdK(7*zb"
        "xC;z$)4@xifdw8Ajc0%XZacUMG!Tn>zyNn0^ad7)hkMUS;BI&=@PLTMo*E%(guqE^V1X#y0|vO|<R#F+0x`HhPG|xRED#sJ1Lw7}"
        "#a;8d02AMz<TtQDG@fabAr}Adj})nuuC9p1S{G|wtkr~R-~my%2Mln_L`tB61!8c2Os)p%;=Q+G5;H==CD6bEktSdR3q<2N;0*p>"
        "{Jkb;#KW2%DDe=phqain_dYSSOm)(k^d&_}N79aTB86g14^n_BW-6H$hMys3I7Rw&s2C!Kf?MXcR1EE9aXC?*n!|G#KFXi<DPVvb"
        "E}jG$*!0Z;2Ds(IN}z#lzgXj9OQ3;W4_2Q6OHoYiw8Ilrx-h#uS$!rf0AyFerdU|YFc-pWfEzC61~$FG0tUF{B2S=!Z7;sYg`YqJ"
        "yWUU%C?svH#KKm_k5<~cHoWOdi$($sY&j6s77_-e_9rMUR*r(im7_2ftg4^byyxJt;zul7F@dx4Vo)hY2{f?fAQynbR<LU=R;g;e"
        "s)SIKEMQDTm4)mMo_qLy-dEJ7Eo^ByrsPsWDVI5xK#5*kwv<px5v3zt{)v*6AfkK{rIFBPC7cvKrW9$DyqMZ_ibM#86k*EnHd9+s"
        "^`t%vKwB{<me}}?AE2YT&m^KsLLpF{rRrg(5EaZ+x+ute8M=w|n{?1ji8KO=Ie%i^QjZoX$uRDk<b>u)$Y=0(@tah6T&XpAdnEEy"
        "$q*||X6TQE|6$S47Ll83jtb7cSL(ps)j+YZp$CN9BwHcd9orjQ7~2)w65Ei9qcpRdNV*MB?kVdkoU#;CcGYCklB$BDG#<-WK_e(v"
        "1&vS>O3MtTM1@x_ah9_hRJvSMkmb^18L4rl%YkK}VkO;4?=)peRTXfVf+}RviBw5bL2PHnj?={SsMwhXhCLisHN^BbrS#lFcuA@<"
        "PIEkzGRW6>n;&Qe*6e0VVn8dfW{U`KvcZxp&<d>C!onBWbVD7u)veeKj#R9r3arvd4|>W(;{~mdAaNo#>o*oBPWsolQ(bk`u|jI*"
        "W*+55si`lXc^0!$7g}|Plp3uRBGQXLWpZ<NUKBoVh=zch`ZEQoPJY!TLkbFmkQPU7`p-1XwOBF;{~Cz2g`-WQ?V`n^y3sbtT%;`!"
        "?T<vZyc3Qp<B_%xv<ebn2KKm(vsJS-OO)#)%;lEH_9nBEZbxiA5^W~qxIM51Q0^t<Ob}%`ETvy_({crpCnb-n7M2UG?vBk*xWwd4"
        "SUSgLpbkKKhv}-yOH)b_4^u#<DV&b4c}j0xt|Yu%DQfujudxa_yixa`{F$tj>smRQP`9)3iZZzv)%P)BA)?*?nXwxWljDi^)U?X>"
        "n|6BA_ITK7!j@LXt!*jQ;J7PZB<-J>OIsA$5H&xN8M>h+NKz}yXm|IT;Bqk~X+=X!8Nrq_lkBJf*kQtD`!$JS8hy>;1D4^rHjZ^i"
        "O_oJNhs3*kZ6seJtEfUY;N#;7k03l|@Yuj3!h*jtn+$T;a?5z8tuAe?n)b1sRP(M+120=I8Pv2@qAl7;7wfTgQNn0P!gfMUpGC|z"
        "exD636N+9aGr-~ww=q>nSn}nNDdk5FO7bgbKsh~@J`sYIAC@B-<FGV*4RX2+<%q+jBhwtF^4C1SwE-a&nChE9GtJP1w<X2rv>cL6"
        "FeExxX1nLAlY^mPAetjaWs?ja59y|Pq@x?8qq=;VVs(5R5}7$zxSGg5nIG;(mu<4lP<;#$#f@qLw#yt*=w$3+A4rO$)0tYP78!1B"
        "m#!w<GQJ0Zxi(dlvcJQ?UX_#%1p~#b8PZ4sN=i&BO*jhpz<?oS1kQarJhYFsk3!2MCH&S4AN6=N<5A+_0Ua=!)ncn96Tx6Unu(v?"
        "pq-G(qgd+{fHsMsJzhMNAb1bugE3YK;2YS+Lq^|vDh|(Kog4@SKmP$w`^De"
    ),
    "IQ3_XXS": (
        "c-jrlxq_-N6adgHAnhffwn+eK6A)<;L0Ui^TO7AGg3R~7cfQ~tM39AC<e@d<NFt3&G@%(`Ofg`F1&*-73Etx~HW(2?EaDPQB+(=#"
        "IqAri%mh=10%bI!hI&?RRo2y-tl7f0V<&cRXN$)I9N$?v2j}Kspa8%?KmZC7*g^v>AeXqV%U$VWMj0^11XFBe$Ri&2w0HDg9`<d&"
        "_4zVf9+#h`y^`zVf17ZZdz^F0H(c|QV?l*2KrkVM5_j<yMj%O~E7y`sDRWuKi^Ks0eqe%ckcFp^Msc){z7dXTyo&1>D^N@c6{uD{"
        ")u@mrnrp2qebhLi2_#X{Cu8EKX{xr(cHE+Dk;&|m`McfjzDx5Vw~BR<6?t(guElrH%e*Ygp?sCjp*~nuS3RnzKGdeR8)#Ug8rJSx"
        ")1q$CZMsY6_enqY<a9d0IXK7X@k}oI(*A_k@){1+a2y_kxZQ5+-^Z`I@9x#Ze)iAwMc?90jcptQCNaI)e2Nbn>#-lvw4Bmun8bJg"
        "MKhVhS^fP3Oa56L"
    ),
    "IQ3_S": (
        "c-jq-xpt~R06=F$+F4lInE|97Hf`CImPL~mNlaQqllS{CKXA{v_W}R`0v50V1q^WD01rr@Km;;Sf*PDa2L>>K87$xdUf>@95JChA"
        "q>w=uN*KTxCa{1lyumx%{%{ak$VL<i<ROJ3WKfQ3bV3~((1cd>L>M#dVu>|QaE1@K#XTPJH-6wB42U2;Q6wZODM>>HvJzwwOIq66"
        "TbWf^C#$o*tf#fxv7Oi@yK(o}0UO!GmbSL{c4qhX<xdDwL<yyoQ9)hmQ%N;VXig9GLf`0(Zhy*<VYXwGIZQFbGFGvkjcjGVe=#_B"
        "xz8mJdCE)P@GGDB#-Sj>7E}nKL@bQRMI{!o3hY=8cN`~iGN*RVPVZbC=u%g>$~A844zBb<FZNpR>_H#<)aSnP3%~LgfAxWc5=%?k"
        "l1eTe=}9F68A~HmS;<D8WG_egEm!%JKYxReqDm-VX%(qN<*HVLf|_VsD;;Q~kGj&6e%BBE(jY*A6|g`DVUPq_PzQbR6~NFAWf+8M"
        "ScFx$g+C#QSfrz4R7O*@MqrQj_FnC;``g}%S-g);+{As13^T&G#y8p|CNqVpO=~(cm=E(XFu{qHIEhMvq)g^yOMVlO@>Hg2nx}mV"
        "GnzS>%7QG;Ojc!0)@9f1nc<w}Uas>bAM-i?%wa(bUPMJ&w8dNTEWAT?fJc0kM|~`gpd=+PWf_)nnU+=AmurbCyJD57bY-fdYO0~S"
        "R<Oo3t=(GHSzXre^-`}jX;>o~+2|%|iUzc(4clW|wvX02*(Y^cPU4)O=QHix&U8&Tbf~Aj)9b$M+rI0^{;PlWaKM8#@Iejfunk~j"
        "V=$WWFis<y?1@hC)K0^6pPm!Ekc+&em-B^R_t)V%UF$dWPTuu9o5k$T$(+se3~urk-#%}A$(MS$F3Ykm;KTV)ALU2%*?caa;EwP4"
        "eZE^?<rn)F-(V%Hy~<UuhqYWU>$0K;dxVeXaeBawY;^NBwV7?$&@+7&&*=$Y)=RwPtAFXA`Um|czu@10ksz_)"
    ),
    "IQ1": (
        "c-k$QfuZX<2t#8g08e0h{~>!M_4Vtwb#haJ0SWSb-&bJ30S~Oj_mu+$4tQXiW1QGvgW36`0tY-WHy0^zzytj)uD`hM`WkF-!2?sQ"
        "H*4U6;)e%3ur}v|4Gx&Y+GP!FFfT^xb-)9&VswE69+)oduJ3~0yzkspfdd{`m-E2Ax!D2-Jg`<{cVl;BFL%?8t$fBI5A^0USeJD$"
        "FL%r*zqbC5;|_S>R-8EC$(e(9K!X7r+=-J53^?F{b--l}9Pq$;{4E%;!PWP*@$tsi{WZ{L6&P@|ahqdcgA3;H{c<k2HybOj>h-{^"
        "Y;=JG9+*DZeK3>HJ3&z3fCuI#C<+|#0M_Bpi+vaSc(033S?lZISzz?OIR-9Rm(O5>3+5%r%9cI9W+mtf9Pq&O<9ZKY^1k`L6O;u8"
        "9Psq{CQu6;@D#KOSB0iRZv8_@p`h(|K+k_W{%&3q7wYzOJGzCnVuCKEKVARBzIuTHXXQ(S3x*_lN|eb7<iu(~UaSr7B#8zze_SNf"
        "fJH*}%f%XOFhzoK;SDY*5^lf&50DRp0c$5e-e7}y<!s&FDWad(fCDaA#W8?0u$Rx^fCqE~4ag7d<$O>iI61No=)>Ac!Z#Rj0J*c?"
        "&CNF;kJbg{?9mR#A+kiT4K7g8C@|oF_jgzWatzzzyaMDHA6WzB7(R$o8<1!Cf^|TWtO5-N9Pq$*vjGjrL43vefIM{3DnK53gH$od"
        "NPM_$tzHK_fJ5+K3S0ql6k9nCUT1U3RZL?ITx~Xmu)%->$lLY6rZ_%Omt&wG$H4NhQFZD#P#SD-fr{yX1D*=&<{Z#qgA3-cc3A`S"
        "QhduEzud!h;E}u7PegzLrxT0~$Ybm$%fXuz?Ew$m!+Dp#1p^MiiKHpVgzwo?UA%)Pus66sg}=an1Nb9s<`^Kaxh~(qyCH}QMTwF`"
        "FD498#DoG=>WeZ?(0@faB>`M2O)8a=rV>_^C6kQG%%qH{WKhkW%E|_%qEf8*Qlvr=&I&t)l0w5tsV!$aYwP_G-ne1M6}l}F)<5fN"
        "wj9|ZH2s6qu$Q$iC-(;M8rS1H2jMep<@06jh5+>ka2d9;Mlm3}h&(DUfX}d#cR&tfZ~NlpE;i$RuqhsMQb5R8?Bw%f?WKAv^K{o&"
        "9&NsZ(<wCM8`t94#8`5y;Ig_WgiIb`Cu@Kla#4cI3LYzX40|E#rJLK>yZMFfqICiJQQuAhBNwU<8FfPN?@#h&wmN17Rfo?WJbuAp"
        "*m_+28o*%|1acxAh94si<WTqv{~hl4x=>P?u;==&H%0Sy98S!;fWlq)jdd_5!UF!ncN}}Hy$FpmlRh)nSJ^CCrWgF>Lc9SShJ6tw"
        "+Dy0$vsk+kDcW4Pi??TWu_B#XJAx$XioBqlSt_`&OB!swhh8bZd<S1>Pc$c56P1aYR7LwwIieX+jOas@p>nUXuCi^S=#*NORh3G9"
        "lkWuGNqI7nbjl5)DZ!|+LE85}?NLTfDW#FC<dj3#K|2W(?tu^z*g_0x+=T7^`BWvAiEV77f^^7A3&c0Jg}4;>a1*w1&Y#FOfTJw*"
        "loTVu_d;-2?^cy#6(^;!%z|Ua*{+1DDC2C<POi=m>jfXNCu0FAl9Vyz2=)+-;QonI29huA5o<dM$q9ri=baEMCu1Au0C<Sd;yX!u"
        "zyng&<PdwfeY0Z**si9la`TE{iP*Ab9RCYi5jH`GZ5vZKPv0p9@DIKUnWG!~$#Iv@V7)kTKm9HdfiuZFe($&{kfhxE;re_B@DFCi"
        ";qVTZVf{oPXahF50RFLHKtB?bumF(Y=0vW4&1$Q%S*i}7J<NH3fl-r9BtN+qvK7Eb+z)GjT*YkO5h8GtiyXYf?{n?HFu}Rp7svIk"
        "K;Y`zzkrIT7{W!wB<q{Coj{pKMx=F`f6Js6No|kX9JMfNSsYAiLB6yVBM+^#2x<w`0!Z>pzDuf0ZcAQEDpOwgyGUS3T*+B?6vt}X"
        "^3%epBO#?EpdCv_v7O}L{3W1dp9NM&zBvly!7q}_#l9n<B$p(OB!eV*EXX>tMG{3)MAAbt!$Pei2_ykT`EG_p<L^bpiFPY=X@*~+"
        "IZ>48NOWThI+P+R5p{?XL<OS~{-q?V4D%Z<vq`{|KMTW7X;L}DG?$%ODJf<GN{B01r%b3cIC|Jo@5o9TD`l0QO2_%9oyBG)jg&S@"
        "6{UqzL1C>hR=BzVOhQj##@?}(FjC043$BF1{I}hm(U&bWxpua}O7X^(7P%ew*d=nsm)mvK?3nGWJ~6=&w(=*wEB&JuabFw<@86V4"
        "G^<GIAT^0N<T!Xbc2d0bM{qm$nI={uTLn!QqDB#`eEbXVez`bYPt2y_rCxF0col4SmSn5e-ATlVV^x{vcv%6dIC2c20N6v0S491|"
        "a<S&Dhe<mP^_qy0p4^aL=xog7oPQ&r!mAraTUfN{hS3-7BWr-V=Vn1pKyM&m;tXmZGL&<k?n90^?z-=H+%b+-cNz>>+m1V~9%(ju"
        ";z(Jf*9GWvZjWPN^ce!U;FFNLar(JwQtrP|DNhluJK*ImEE}?|$gfqI*tt8Kv|SZ5Tv!uf)|1WKw&MEr{*8}FN1ICR#09LKY%ulH"
        "O_2ymn@tU6nRR^^LD49oc^m{!!wXa<&SUSmawRZe3~Wg=HQo`{{L2xC3Yr5RSdblB$bwOUg!bq6SOe=NusUNTjg1^&u(`%E8nv*y"
        "@~%fGZq_<uk$u&;5rA6(`1p(vZBI?y+EX&!j;qbKK;3Db9jMeyH+_?qQr=N3x7Dtpe@w!(R2H=g=9LykZHt@3ot6M~W~nX-?f~D8"
        "0@nY5z9KUv5hcwmj>lahEVR;GZmZD@f-17djQjpgXGeNC;<c;PF?*px`xXQfDi-xxe0OMc|0#3-DN%IDJtWCa=*Z3Ngc95VcFLxe"
        "gi7F-66T6IDJ_nymDKf%MfQVt(t<F@cWH_z;inM828WOnn48$=r9rr#w*Y$KGT_8zR=;D_!Ri0Ty7Tk<|5Lh*qd`kYQNjPH1^9zw"
        "5<wIP48sS!X^=)kj*#FW|LGl(M0e`~BK2F7LZawZ<9`1I1--*Ha#3=ZIJ=%EslceQZ+AG?9fgK;%Zl*Y0I8-m5n$tLb)Au)J%$ni"
        "G+68-p8<);Uh(~<aG__|qvvVDS<ec+t%e?ZlcIK<X%TkgD{?+X4vmA|9J{&UFXLj3gEjv35V105)j0L2AbuHzp3YcPV@wywFQY|`"
        "4>c}y!Td7L)2L3PITuh3HY6-DT2lm#vNV>`_(@|V4=Za@Xm>_8sz@5GXl#N9Qh@LAxWXHx5roDGUq%9+WU9qik^a(lyE9bxwbI_I"
        "WyS6cL@O<$+C=QmfV9%4sV!4$gsmCEs2y36`jY7$%CvVU;`sgtG?I1|iFGvD*zP1Loslgj3dxEUDmQ8DP%PICf$Y$g=*Yt!QOyoj"
        "9B6@tHUz^TIVhK>No?r~;jEMjrT8I7Jm?hx-K3X?Mca|EePs=fo<j0vAY9o_Pg}JWU)<;pTkcuzWR8bT9W$_-_nkqqPSrnpaTA^f"
        "%WBNEKtFB*q$qh%rKUlNBtl%B24Y*yU#sPs5G5>v-Dxi52@)5d^Z8|9U7lV)PlrXQUu6hz+;Ou;$Fr>Do>jniG9ZvqdWnEF?AE|Q"
        "M$(gGryqG-B{!Q(xP_qA{q8(AFj=3B?=^xaqqIXFlXD9mg=_q6LSKH`;BoWSg#61`*pAQyY-QX_;&Z$*aF+o1GBS13G#Pbje0eJ)"
        "MmJL0#md-DV>%D}I^(s=#Wf=H@UJtn()h`Z*Uo6j1O3X#$D5(Tg&~f%&Pasol%M3ZpE!8LU@@YNQ#=2q&34z&X^CC%PTE|xvxKNy"
        "R|}U;>*zsDr@iyW!%6&B9xhB;CbdU?(6G|lSnTYyB$~ik_*_p`GRW-6dly*A^)GVUT}DSDyYQY!TdR;2xoL*luDGKL<7`tT%exi1"
        "<=2ipq7-xe$RG<X1?&3{Pt~w~krLR-=Tc$co-9r1*&VBBwnCvMfcqC|N3=(@w<Dgie=?xz(1jadm39KpPnUMeqNj5!<;mS<rNnUU"
        "W2Mz82d*NDn4NUO{^KWNJ7MbwIhAl@pB+lvLx#Ye5b-3cvc>NFwS6mYx0u{<lZR<z#<jVw;HsSZsmdw%l6C$EIps;2ru3CYUgXCO"
        "`(ctqsghsAXDX!!(CwWFIevNksmGgoGNeb7e)v>*bf`y!dJL#XdwQIw$8>ru=Z903M`3#O^|Z5J9!<Hp=uwlN-r*QMwb3IVP3@m1"
        ";ZL9QI7HpC#qzP5_2UCQB2cwfB~T`5r2cfbl~J{yW_^pBT^TB#jDI!G<$CH=JZ`n<{xS-6fm78|^nDpYy5MQ7c$dd*9>i<#@wr=V"
        "i}jOHlLz!;_2ZF{oh%{0{lv~=2oE&JPZJOmY0uSet9AA?pwn(zblku2=ZgpZYLV0g?2`?vv?5QDCi%W1t??b7Jwdj_wP?X%9-z)d"
        "z(_)(>rl;nhxw?kTr0vx5ran`mizTZy13B4{{zGd)qCnHdhSrH1LzC2nGnPP%Hl87;g={uWxn&I16!|~7fPR}H<OfiH?Vht@JpEc"
        "L1iVJ{G{^Bwwi3TRm;-@yUdEIVuD#nm;G{@t<b+87xf<?"
    ),
}
#: Weights of an index.
_WIDTHS = {"IQ2_XXS": 8, "IQ2_XS": 8, "IQ2_S": 8, "IQ3_XXS": 4, "IQ3_S": 4, "IQ1": 8}


@cache
def grid(kind: str) -> Tensor:
    """For each index a word of 4-bit codes without signs, the first weight in the lowest bits: int32, or
    int16 where a word has four codes."""
    packed = bytearray(zlib.decompress(base64.b85decode(_PACKED[kind])))
    dtype = torch.int32 if _WIDTHS[kind] == 8 else torch.int16
    return torch.frombuffer(packed, dtype=dtype)


@cache
def signs() -> Tensor:
    """For each byte, whose bit i tells that weight i is negative, a word with SIGN in those codes: int32."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    codes = (bits * SIGN).view(-1, 4, 2)
    return (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8).view(torch.int32).flatten()


@cache
def even_signs() -> Tensor:
    """The same for seven bits. The eighth makes the number of negative weights even."""
    low = torch.arange(128)
    parity = (low[:, None] >> torch.arange(7) & 1).sum(1) & 1
    return signs()[low | parity << 7]
